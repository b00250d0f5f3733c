"""How a process extracts its share of a dataset, and what makes the result one whole."""
