"""Samples of text and images, packed into sequences; needs the extra `data`."""
