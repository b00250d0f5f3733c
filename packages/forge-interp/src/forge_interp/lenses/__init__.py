"""Lenses: predictions from hidden states."""
