"""Sources of samples with images; needs the extra `data`."""
