"""What may stop a run."""
