"""Samples of text and images, laid into sequences; needs the extra `data`."""
