"""Inspection of checkpoints on disk, for the command `forge-ckpt`."""
