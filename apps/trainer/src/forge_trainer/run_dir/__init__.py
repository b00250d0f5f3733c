"""The files in the directory of a run."""
