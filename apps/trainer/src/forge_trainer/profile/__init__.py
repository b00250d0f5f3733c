"""Where the time of a few steps goes, operation by operation, and what the memory of the device holds."""
