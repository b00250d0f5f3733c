"""Where samples come from; needs the extra `data`."""
