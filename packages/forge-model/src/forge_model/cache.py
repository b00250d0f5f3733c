"""Keys and values of the tokens a generation has seen. B batch, K kv heads, S capacity, H head dim."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """Of one layer: [B, K, S, H] each, allocated at the first use, filled from the left."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add [B, K, T, H] and return all there is, [B, K, length, H]."""
        if self._key is None or self._value is None:
            batch, heads, _, dim = key.shape
            self._key, self._value = (key.new_empty(batch, heads, self.capacity, dim) for _ in range(2))
        end = self.length + key.shape[2]
        self._key[:, :, self.length : end] = key
        self._value[:, :, self.length : end] = value
        self.length = end
        return self._key[:, :, :end], self._value[:, :, :end]


class Cache:
    """Of all layers, and which of the cached tokens are padding.

    Args:
        num_layers: layers of the model.
        capacity: most tokens that fit.
        padding: [B] integer; so many tokens at the left of each row are padding.
    """

    def __init__(self, num_layers: int, capacity: int, padding: Tensor) -> None:
        self.layers = [LayerCache(capacity) for _ in range(num_layers)]
        self.padding = padding

    @property
    def length(self) -> int:
        """Tokens seen so far."""
        return self.layers[0].length

    def positions(self, tokens: int) -> Tensor:
        """[B, T] positions of the next tokens, counted from the first one that is no padding."""
        index = torch.arange(self.length, self.length + tokens, device=self.padding.device)
        return (index - self.padding[:, None]).clamp(min=0)

    def visible(self, tokens: int, window: int | None) -> Tensor:
        """[B, 1, T, length + T] bool: what the next tokens see. Padding sees itself: no row is empty."""
        from forge_model.mask import sees

        query = torch.arange(self.length, self.length + tokens, device=self.padding.device)
        key = torch.arange(self.length + tokens, device=self.padding.device)
        by_position = sees(query[:, None], key[None, :], window)
        real = key[None, :] >= self.padding[:, None]
        own = query[:, None] == key[None, :]
        return (by_position & (real[:, None, :] | own))[:, None]
