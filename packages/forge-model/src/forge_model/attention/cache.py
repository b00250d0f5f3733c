"""Cached keys and values of a generation. B batch, K kv heads, S capacity, H head dim."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forge_model.attention.mask import Mask
from forge_model.error import ModelError


class LayerCache:
    """Keys and values of one layer, [B, K, S, H] each, allocated at the first use, written from the left.

    Attributes:
        kept: what the layer has computed from side inputs that stay the same, by name; see `once`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.kept: dict[str, tuple[Tensor, ...]] = {}
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add [B, K, T, H], where the H of keys and values may differ; return all, [B, K, length, H]."""
        if self._key is None or self._value is None:
            self._key, self._value = (_room(one, self.capacity) for one in (key, value))
        end = self.length + key.shape[2]
        self._key[:, :, self.length : end] = key
        self._value[:, :, self.length : end] = value
        self.length = end
        return self._key[:, :, :end], self._value[:, :, :end]

    def once(self, name: str, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Call `make` once for each name and keep its result, such as keys and values of images."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    def crop(self, length: int) -> None:
        """Forget all tokens but the first `length`; shorter caches stay as they are."""
        self.length = min(self.length, length)


def _room(tensor: Tensor, capacity: int) -> Tensor:
    # zeros: a mask that hides what was never written multiplies its values by 0, and 0 x NaN is NaN
    return tensor.new_zeros(*tensor.shape[:2], capacity, tensor.shape[3])


class Cache:
    """Keys and values of all layers, and which of the cached tokens are padding.

    Args:
        num_layers: number of layers of the model.
        capacity: most tokens that fit.
        padding: [B] integer, number of padding tokens at the left of each row; None means no padding, where
            a single new token needs no mask.
        device: device of the tokens; absent means the device of `padding`.

    Attributes:
        shift: [B] integer, added to positions that are not given, for prompts whose positions do not count
            their tokens; None adds nothing.
        side: side inputs of the tokens after the first pass, so that callers need not pass them again.
    """

    shift: Tensor | None = None

    def __init__(
        self, num_layers: int, capacity: int, padding: Tensor | None, device: torch.device | None = None
    ) -> None:
        self.layers = [LayerCache(capacity) for _ in range(num_layers)]
        self.padding = padding
        self.side: dict[str, Tensor] = {}
        self.device = device or (torch.device("cpu") if padding is None else padding.device)

    @property
    def length(self) -> int:
        """Number of tokens in the cache."""
        return self.layers[0].length

    def positions(self, tokens: int) -> Tensor:
        """Return positions [T] or [B, T] of the next tokens, counted from the first one after padding."""
        index = torch.arange(self.length, self.length + tokens, device=self.device)
        return positions_after(index, self.padding, self.shift)

    def mask(self, tokens: int, span_ids: Tensor | None = None) -> Mask:
        """Return the mask of the next tokens; tokens in the same span [B, T], except span 0, see each other.

        Raises:
            ModelError: `span_ids` is given although the cache has tokens, whose span ids are not stored.
        """
        if span_ids is not None and self.length:
            raise ModelError("given span_ids after a cache that has tokens; give them with the first tokens")
        return Mask(tokens, self.device, cached=self.length, padding=self.padding, span_ids=span_ids)


def positions_after(index: Tensor, padding: Tensor | None, shift: Tensor | None) -> Tensor:
    """Return the positions [T] or [B, T] of tokens by their index [T] in the cache; see `Cache`."""
    if padding is not None:
        index = (index - padding[:, None]).clamp(min=0)
    return index if shift is None else index + shift[:, None]
