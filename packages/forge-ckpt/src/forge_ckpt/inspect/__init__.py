"""What the command `forge-ckpt` shows of checkpoints on the disk."""
