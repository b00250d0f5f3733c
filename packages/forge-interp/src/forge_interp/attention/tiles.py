"""What are the scores and pattern of an attention call, tile by tile, and do they explain its output?

Letters as in `attention.call`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_interp.errors import InterpError

if TYPE_CHECKING:
    from forge_interp.attention.call import AttentionCall

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
HIDES = -1e4
"""An added mask hides a key where it is at most this number: exp(-1e4) is 0 in every dtype."""


@dataclass(frozen=True, eq=False)
class Tile:
    """Some queries of some sequences with all keys; values in float32, or float64 for a float64 call."""

    call: AttentionCall
    batch: slice
    queries: slice
    keys: Tensor  # [b, K, S, H] of these sequences, in the dtype of the values here

    def __post_init__(self) -> None:
        """Put edited values in place of those that would be computed."""
        for name, edit in self.call.edits.items():
            self.__dict__[name] = edit[self.batch, :, self.queries]

    @cached_property
    def _masks(self) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """The additive mask, the places set to -inf, and the hidden places."""
        call = self.call
        _, _, num_queries, num_keys = call.grid
        here = torch.arange(num_queries, device=call.query.device)[self.queries]
        bias, blocked = None, None
        hidden = torch.zeros(1, 1, len(here), num_keys, dtype=torch.bool, device=call.query.device)
        if call.is_causal:
            blocked = hidden = hidden | (torch.arange(num_keys, device=here.device) > here[:, None])
        if call.mask is not None:
            mask = self.part(four(call.mask))
            if mask.dtype == torch.bool:
                blocked = hidden = hidden | ~mask
            else:
                mask = mask if call.query.dtype == call.output.dtype else mask.to(call.output.dtype)
                bias, hidden = mask.to(call.dtype), hidden | (mask <= HIDES)
        return bias, blocked, hidden

    @property
    def hidden(self) -> Tensor:
        """[b or 1, N or 1, t, S] bool: the keys that mask and causality hide.

        A key counts as hidden where a bool mask is False, and where an added mask is at most `HIDES`: models
        write -inf, the most negative number of the dtype, -1e9 or -1e4.
        """
        return self._masks[2]

    @cached_property
    def own_key(self) -> Tensor:
        """[b or 1, N or 1, t] int64: the key at each query's own position, in self-attention.

        Key t where there are as many keys as queries, or `is_causal`. Else, with cached keys before or empty
        slots after those of the queries, the last key that the query may see; -1 where it sees none.
        """
        _, _, num_queries, num_keys = self.call.grid
        if self.call.is_causal or num_queries == num_keys:
            count = self.hidden.shape[2]
            return torch.arange(count, device=self.hidden.device)[None, None] + self.queries.start
        last = num_keys - 1 - (~self.hidden).byte().flip(-1).argmax(-1)
        return last.masked_fill(self.hidden.all(-1), -1)

    @cached_property
    def raw(self) -> Tensor:
        """[b, N, t, S] q k^T * scale."""
        call = self.call
        query = call.used(call.query).expand(*call.grid[:2], -1, -1)[self.batch, :, self.queries]
        product = grouped(query.to(call.dtype), self.keys.transpose(-1, -2))
        return product * call.scale if product.requires_grad else product.mul_(call.scale)

    @cached_property
    def scores(self) -> Tensor:
        """[b, N, t, S] raw plus the mask; -inf where a bool mask or causality hides the key."""
        bias, blocked, _ = self._masks
        scores = self.raw if bias is None else self.raw + bias
        return scores if blocked is None else torch.where(blocked, -torch.inf, scores)

    @cached_property
    def pattern(self) -> Tensor:
        """[b, N, t, S] softmax of the scores over keys; a row of zeros where all scores are -inf."""
        sees_all = self.call.mask is None and not self.call.edits
        if sees_all or not self.scores.shape[-1]:  # each query sees a key, if there is any
            return self.scores.softmax(-1)
        empty = self.scores.detach().amax(-1, keepdim=True) == -torch.inf
        if self.scores.requires_grad:  # or rows without a key would have a gradient that is no number
            return self.scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
        return self.scores.softmax(-1).masked_fill_(empty, 0)

    def part(self, x: Tensor) -> Tensor:
        """Return the part of a tensor [B or 1, N or 1, T or 1, ...] for this tile's sequences and queries."""
        rows, queries = (
            which if size > 1 else slice(None)
            for which, size in ((self.batch, x.shape[0]), (self.queries, x.shape[2]))
        )
        return x[rows, :, queries]


class Gate:
    """Compares pattern V with the output, tile by tile; see `AttentionCall.check`."""

    def __init__(self, call: AttentionCall, tolerance: float | None = None) -> None:
        self._call = call
        self._eps = product_eps(call.query)
        if tolerance is None:
            dtypes = call.output.dtype, call.dtype  # a model in float64 may take its softmax in float32
            tolerance = max(4 * self._eps, *(TOLERANCES.get(dtype, 2e-2) for dtype in dtypes))
        self._tolerance = tolerance
        self._ratio = self._worst = torch.zeros((), dtype=call.dtype, device=call.query.device)

    def add(self, tile: Tile) -> None:
        """Compare one tile."""
        call = self._call
        values = call.used(call.value).expand(call.grid[0], -1, -1, -1)[tile.batch].to(call.dtype)
        # one product for both: reading the pattern is what costs
        made, sizes = grouped(tile.pattern, torch.cat([values, values.abs()], -1)).chunk(2, -1)
        error = (made - four(call.output)[tile.batch, :, tile.queries]).abs()
        blind, scale = tile.hidden.all(-1), sizes.amax(-1)
        low, high = tile.scores.masked_fill(tile.hidden, 0).aminmax(dim=-1)
        size = torch.maximum(high, -low)
        tiny = torch.finfo(call.output.dtype).tiny
        allowed = (self._tolerance + 16 * self._eps * size) * scale + tiny
        ratio = (error.amax(-1) / allowed).masked_fill(blind, 0)
        self._ratio = torch.maximum(self._ratio, ratio.nan_to_num(torch.inf).max())
        self._worst = torch.maximum(self._worst, error.amax(-1).masked_fill(blind, 0).max())

    def verify(self) -> None:
        """Raise InterpError where pattern V and the output differ."""
        if bool(self._ratio <= 1):
            return
        is_finite = bool(self._worst.isfinite())
        what = "something else takes" if is_finite else "numbers that are not finite take"
        raise InterpError(
            "softmax(scores) V differs from the output of F.scaled_dot_product_attention by "
            f"{self._worst.item():.3g}, {self._ratio.item():.3g} times what {self._call.output.dtype} "
            f"explains; expected equality: {what} part in this attention, so its scores and pattern "
            "cannot be known; capture attn.q, attn.k, attn.v or attn.z"
        )


def four(x: Tensor) -> Tensor:
    """Return the tensor with four dimensions; new ones have length one and stand in front."""
    return x if x.dim() == 4 else x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))


def grouped(left: Tensor, right: Tensor) -> Tensor:
    """Multiply [b, N, t, x] by [b, K, x, y], head n by n // (N / K), without a copy of the smaller one."""
    batch, heads, queries, _ = left.shape
    folded = left.reshape(batch, right.shape[1], -1, left.shape[-1]) if heads != right.shape[1] else left
    kind = left.device.type
    has_autocast = torch.amp.is_autocast_available(kind)
    with torch.autocast(kind, enabled=False) if has_autocast else nullcontext():  # in the factors' dtype
        return (folded @ right).reshape(batch, heads, queries, right.shape[-1])


def autocast_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype that the output of the call will have."""
    kind = query.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return query.dtype
    return query.dtype if query.dtype == torch.float64 else torch.get_autocast_dtype(kind)


def product_eps(query: Tensor) -> float:
    """Return the relative rounding of a matrix product that the user's precision settings allow."""
    if query.dtype == torch.float64:
        return torch.finfo(torch.float64).eps
    backend: Any = torch.backends.cuda if query.is_cuda else torch.backends.mkldnn
    eps = {"tf32": 2.0**-10, "bf16": 2.0**-7}
    return eps.get(backend.matmul.fp32_precision, torch.finfo(torch.float32).eps)
