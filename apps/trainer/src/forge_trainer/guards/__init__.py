"""Guards: they observe steps and may stop a run."""
