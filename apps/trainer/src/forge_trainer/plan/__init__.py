"""Plans a job: its memory, traffic and speed, found by running its own code on fake tensors."""
