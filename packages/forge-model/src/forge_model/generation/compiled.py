"""One more token for each row at shapes that never change: compiled once, not once per token.

B batch, K kv heads, S capacity, H head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from forge_model.attention.cache import Cache, LayerCache, positions_after
from forge_model.attention.mask import Mask
from forge_model.decoder.context import Context
from forge_model.error import ModelError

MULTIPLE = 128
"""Capacities are multiples of it: prompts and answers of similar lengths share compiled code."""

SHAPES = 1024
"""Number of shapes that are compiled; the limit of torch is 8, after which it runs uncompiled and slower."""


def shared_capacity(tokens: int, max_tokens: int) -> int:
    """Return a capacity for so many tokens that rows of similar lengths share."""
    return min(max_tokens, -(-tokens // MULTIPLE) * MULTIPLE)


class CompiledDecoding:
    """Decoding that continues rows by one token per call.

    Args:
        model: a `Decoder`, unsharded on one device.
        cache: cache of the prompts, whose memory is used from then on.
    """

    def __init__(self, model: Any, cache: Cache) -> None:
        self._model = model
        self._cache = _StaticCache(cache)
        self._run = _compiled()
        # for the first call only, which compiles: it takes a tenth of a millisecond
        self._limits: AbstractContextManager[None] = torch._dynamo.config.patch(
            recompile_limit=SHAPES, accumulated_recompile_limit=SHAPES
        )

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, V] after one more token [B, 1] for each row.

        Raises:
            ModelError: compilation fails, for example because there is no C++ compiler.
        """
        from torch._dynamo.exc import BackendCompilerFailed  # takes seconds, and is here by now

        x, contexts = self._model.prepared(tokens, self._cache)
        limits, self._limits = self._limits, nullcontext()
        try:
            with limits:
                logits = self._run(self._model, x, contexts, self._cache.side)
        except BackendCompilerFailed as error:
            raise ModelError(
                f"generation cannot be compiled here, go on without: {error.inner_exception}"
            ) from error
        self._cache.position += 1
        return logits


@cache
def _compiled() -> Any:
    return torch.compile(_logits, dynamic=False)


def _logits(model: Any, x: Tensor, contexts: list[Context], side: Mapping[str, Tensor]) -> Tensor:
    return model.read_out(model.run(x, contexts), side=side)[:, -1]


class _StaticLayer(LayerCache):
    """Keys and values that are always returned in full size; the index of a new token is in a tensor."""

    def __init__(self, layer: LayerCache, position: Tensor) -> None:
        super().__init__(layer.capacity)
        self._key, self._value, self._position = layer._key, layer._value, position
        self.kept = layer.kept
        self.length = 1  # it has some; a number that changed would be compiled anew

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, K, 1, H] and return the full buffers, [B, K, S, H]."""
        assert self._key is not None and self._value is not None
        self._key.index_copy_(2, self._position, key)
        self._value.index_copy_(2, self._position, value)
        return self._key, self._value


class _StaticCache:
    """A replacement for a `Cache` that has processed the prompts."""

    length = 1  # it has some tokens, of a number that only a tensor knows

    def __init__(self, cache: Cache) -> None:
        self.position = torch.tensor([cache.length], device=cache.device)
        self.layers = [_StaticLayer(layer, self.position) for layer in cache.layers]
        self.side = cache.side
        self._padding, self._shift = cache.padding, cache.shift

    def positions(self, tokens: int) -> Tensor:
        """Return [1] or [B, 1], like `Cache.positions` for one token."""
        return positions_after(self.position, self._padding, self._shift)

    def mask(self, tokens: int) -> Mask:
        """The mask of the next token."""
        device = self.position.device
        room = self.layers[0].capacity
        return _OneOfRoom(1, device, cached=1, padding=self._padding, position=self.position, room=room)


@dataclass(frozen=True)
class _OneOfRoom(Mask):
    """A mask for one query, whose position is in a tensor, over the full capacity of keys."""

    position: Tensor | None = None
    room: int = 0

    def is_plain_causal(self, window: int | None) -> bool:
        """Never: keys beyond the position have not been written."""
        return False

    def sees_last_keys(self, window: int | None) -> bool:
        """Never: the last keys of the buffer may be unwritten."""
        return False

    def dense(self, window: int | None) -> Tensor:
        """[B or 1, 1, 1, S] bool."""
        assert self.position is not None
        rows = None
        if self.padding is not None:
            rows = torch.arange(len(self.padding), device=self.device)[:, None, None, None]
        visible = self.sees(rows, self.position[:, None], torch.arange(self.room, device=self.device), window)
        return visible if visible.ndim == 4 else visible[None, None]
