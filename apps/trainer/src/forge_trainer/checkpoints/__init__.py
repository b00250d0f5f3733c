"""Loads, initializes and saves the tensors of a run."""
