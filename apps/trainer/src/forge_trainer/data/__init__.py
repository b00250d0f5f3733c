"""Training and evaluation data of a run."""
