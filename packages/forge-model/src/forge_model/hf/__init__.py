"""Checkpoints of Hugging Face, in both directions."""
