"""What lies in the directory of a run."""
