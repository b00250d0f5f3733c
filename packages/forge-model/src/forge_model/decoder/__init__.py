"""Decoders: configuration, blocks, parallel plan, multi-token prediction."""
