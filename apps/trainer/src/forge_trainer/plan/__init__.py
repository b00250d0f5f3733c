"""A job on paper: what it needs and how fast it would be, found by running its own code on fake tensors."""
