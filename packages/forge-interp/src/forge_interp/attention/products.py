"""What is the product of heads, and is softmax(scores) V what a call of attention returned?

Letters: b sequences, N query heads, K key and value heads, t queries, S keys, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_interp.attention.statistics import Tile
from forge_interp.errors import InterpError

if TYPE_CHECKING:
    from forge_interp.attention.call import AttentionCall

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


class Gate:
    """Compares pattern V with the output, tile by tile; see `AttentionCall.check`."""

    def __init__(self, call: AttentionCall, tolerance: float | None = None) -> None:
        self._call = call
        self._eps = product_eps(call.query)
        if tolerance is None:
            tolerance = max(TOLERANCES.get(call.output.dtype, 2e-2), 4 * self._eps)
        self._tolerance = tolerance
        self._ratio = self._worst = torch.zeros((), dtype=call.dtype, device=call.query.device)

    def add(self, tile: Tile) -> None:
        """Compare a part."""
        call = self._call
        values = call.used(call.value).expand(call.grid[0], -1, -1, -1)[tile.batch].to(call.dtype)
        error = (grouped(tile.pattern, values) - four(call.output)[tile.batch, :, tile.queries]).abs()
        blind = tile.hidden.all(-1)
        scale = grouped(tile.pattern, values.abs()).amax(-1)
        size = tile.scores.masked_fill(tile.hidden, 0).abs().amax(-1)
        tiny = torch.finfo(call.output.dtype).tiny
        allowed = (self._tolerance + 16 * self._eps * size) * scale + tiny
        ratio = (error.amax(-1) / allowed).masked_fill(blind, 0)
        self._ratio = torch.maximum(self._ratio, ratio.nan_to_num(torch.inf).max())
        self._worst = torch.maximum(self._worst, error.amax(-1).masked_fill(blind, 0).max())

    def verify(self) -> None:
        """Raise InterpError where they differ."""
        if bool(self._ratio <= 1):
            return
        raise InterpError(
            "softmax(scores) V differs from the output of F.scaled_dot_product_attention by "
            f"{self._worst.item():.3g}, {self._ratio.item():.3g} times what {self._call.output.dtype} "
            f"explains; expected equality: {_why(self._worst)}, so its scores and pattern "
            "cannot be known; capture attn.q, attn.k, attn.v or attn.z"
        )


def four(x: Tensor) -> Tensor:
    """The same with four dimensions, those in front of length one."""
    return x if x.dim() == 4 else x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))


def _why(error: Tensor) -> str:
    """What keeps softmax(scores) V from being the output."""
    if not bool(error.isfinite()):
        return "numbers that are not finite take part in this attention"
    return "something else takes part in this attention"


def raw_maker(query: Tensor, keys: Tensor, scale: float) -> Callable[[], Tensor]:
    """A function that computes q k^T * scale when it is wanted."""
    return lambda: grouped(query, keys.transpose(-1, -2)) * scale


def grouped(left: Tensor, right: Tensor) -> Tensor:
    """[b, N, t, x] times [b, K, x, y], head n with head n // (N / K); the smaller one is not copied."""
    batch, heads, queries, _ = left.shape
    folded = left.reshape(batch, right.shape[1], -1, left.shape[-1]) if heads != right.shape[1] else left
    with _no_autocast(left):
        return (folded @ right).reshape(batch, heads, queries, right.shape[-1])


@contextmanager
def _no_autocast(x: Tensor) -> Iterator[None]:
    """Products in the dtype of their factors."""
    if not torch.amp.is_autocast_available(x.device.type):
        yield
        return
    with torch.autocast(x.device.type, enabled=False):
        yield


def product_eps(query: Tensor) -> float:
    """Relative rounding of a matrix product that the user's precision settings allow."""
    if query.dtype == torch.float64:
        return torch.finfo(torch.float64).eps
    backend: Any = torch.backends.cuda if query.is_cuda else torch.backends.mkldnn
    return {"tf32": 2.0**-10, "bf16": 2.0**-7}.get(
        backend.matmul.fp32_precision, torch.finfo(torch.float32).eps
    )
