"""The activations of a dataset, written to disk and read again."""
