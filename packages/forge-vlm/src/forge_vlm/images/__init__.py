"""From the file of an image to patches; no torch."""
