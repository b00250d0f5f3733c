"""The commands of `forge` beside training."""
