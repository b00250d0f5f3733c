"""Decoders: blocks, their plan, roles, initial values, multi-token prediction."""
