"""Images: from their files to patches, without torch."""
