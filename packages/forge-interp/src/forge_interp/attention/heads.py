"""How had a model rearranged its heads before it called attention?

With fewer key and value heads than query heads, models repeat keys and values for all heads, or, for one new
token, pack the query heads that share keys as so many queries of one head. Which of these was done cannot be
told from the shapes of the call; it is told from the operations before it.

Letters: B sequences, N query heads, K key and value heads, G = N / K, T queries, S keys, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_RESHAPES = {
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in ("reshape", "flatten", "view")
    if hasattr(owner, name)
}
_REPEATS = {torch.repeat_interleave, Tensor.repeat_interleave}


class Rearrangements:
    """What was done to the heads of tensors that are still alive, on one thread."""

    def __init__(self) -> None:
        self._repeats = WeakTensorKeyDictionary()
        self._packed = WeakTensorKeyDictionary()

    def note(self, function: Callable[..., Any], args: tuple, result: Any) -> None:
        """Look at an operation: is its result keys repeated for the heads, or query heads packed?"""
        if function in _RESHAPES:
            self._note_reshape(args[0], result)
        elif function in _REPEATS and isinstance(result, Tensor) and result.dim() == 4:
            x = args[0]
            if x.dim() == 4 and x.shape[2:] == result.shape[2:] and 0 < x.shape[1] < result.shape[1]:
                self._repeats[result] = result.shape[1] // x.shape[1]

    def _note_reshape(self, x: Tensor, result: Tensor) -> None:
        if not isinstance(result, Tensor) or result.dim() != 4:
            return
        batch, heads = result.shape[:2]
        if x.dim() == 5 and x.shape[2] > 1 and x.stride(2) == 0:
            if heads == x.shape[1] * x.shape[2] and result.shape == (batch, heads, *x.shape[3:]):
                self._repeats[result] = x.shape[2]
        elif x.dim() == 4 and x.shape[2] == 1 and result.shape[::3] == x.shape[::3] and heads < x.shape[1]:
            self._packed[result] = x.shape[1]

    def of(self, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
        """What was done before a call, as the fields `packed` and `repeats` of its `AttentionCall`."""
        if query.dim() != 4:
            return {}
        packed = self._packed.get(query)
        is_packed = packed is not None and key.shape[1] == query.shape[1] < packed
        repeats = (1, 1) if is_packed else (self._repeats.get(key, 1), self._repeats.get(value, 1))
        return {"packed": query.shape[1] if is_packed else None, "repeats": repeats}


def unpack(x: Tensor | None, heads: int) -> Tensor | None:
    """[B, K, G, ...] -> [B, N, 1, ...]; what is shared by all heads stays as it is."""
    if x is None or x.dim() != 4 or x.shape[1] != heads:
        return x
    return x.reshape(x.shape[0], -1, 1, x.shape[-1])


def pack(x: Tensor | None, heads: int) -> Tensor | None:
    """[B, N, 1, ...] -> [B, K, G, ...]; what is shared by all heads stays as it is."""
    if x is None or x.dim() != 4 or x.shape[1] == 1:
        return x
    return x.reshape(x.shape[0], heads, -1, x.shape[-1])


def canonical(given: Mapping[str, Any], packed: int | None, repeats: tuple[int, int]) -> dict[str, Any]:
    """The arguments of a call with queries [B, N, T, H], and keys and values [B, K, S, H]."""
    changed = dict(given)
    if packed is not None:
        changed |= {"query": unpack(given["query"], packed), "attn_mask": unpack(given["attn_mask"], packed)}
    for name, times in zip(("key", "value"), repeats, strict=True):
        if times > 1:
            changed[name] = given[name][:, ::times]
    return changed
