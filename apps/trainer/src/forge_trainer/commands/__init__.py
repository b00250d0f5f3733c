"""What the command `forge` does beside training."""
