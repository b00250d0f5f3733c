"""Attention: masks, caches, rotary positions and the attention modules."""
