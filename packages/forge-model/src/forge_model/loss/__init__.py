"""Losses of next-token prediction."""
