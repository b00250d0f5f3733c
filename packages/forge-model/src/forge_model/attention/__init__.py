"""Attention: masks, caches, rotations, and what attends."""
