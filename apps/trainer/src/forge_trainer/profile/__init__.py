"""Profiles a few steps: the time of each operation, and the memory of the device."""
