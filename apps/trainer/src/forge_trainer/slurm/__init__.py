"""A run as a job of SLURM: the batch script, how it is submitted, and whether it runs again after its end."""
