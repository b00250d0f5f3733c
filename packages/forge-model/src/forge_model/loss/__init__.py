"""Losses of next tokens."""
