"""Guards observe steps and may stop a run."""
