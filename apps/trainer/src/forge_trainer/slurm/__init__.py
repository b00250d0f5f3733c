"""Runs as jobs of SLURM: the batch script, its submission, and whether a job runs again after its end."""
