"""The tensors of two checkpoints that differ, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_ckpt.inspect.checkpointed import Checkpointed

if TYPE_CHECKING:
    from torch import Tensor


def compare(a: Path, b: Path) -> Iterator[dict[str, Any]]:
    """Yield the tensors that are not bit for bit the same, in order of names; two are in memory at once.

    Args:
        a: folder of one checkpoint.
        b: folder of the other.

    Yields:
        `tensor`, `difference` in words, and if values differ: `elements`, the number of different ones, `of`
            the
        number of all, the largest absolute difference `most`, relative to the largest value `relative`, and
        the root mean square `rms` (text, if not finite).

    Raises:
        DamagedError, UnreadableError, UnsupportedError: as for `manifest.read`.
    """
    one, other = Checkpointed(a), Checkpointed(b)
    for key in sorted({*one, *other}):
        if key not in other or key not in one:
            yield {"tensor": key, "difference": f"is only in {'a' if key in one else 'b'}"}
        elif difference := _difference(one, other, key):
            yield {"tensor": key, **difference}


def _difference(a: Checkpointed, b: Checkpointed, key: str) -> dict[str, Any]:
    import torch

    one, other = a.manifest.tensors[key], b.manifest.tensors[key]
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        text = f"is {one.dtype} {list(one.shape)}, and {other.dtype} {list(other.shape)}"
        return {"difference": text}
    x, y = a[key].flatten(), b[key].flatten()
    if torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
        return {}
    differ, apart = _bits_differ(x, y), _apart(x, y)
    numbers = x.is_floating_point() or x.is_complex()
    x, y = (v if v.is_complex() else v.double() for v in (x, y))
    if numbers:
        differ &= (x != y) & ~(x.isnan() & y.isnan())
    apart = apart.masked_fill(~differ, 0)  # infinity less infinity is none
    differing, most = int(differ.sum()), float(apart.max())
    if not differing:
        return {"difference": "differs in bits only: in signs of zeros, or in NaNs"}
    largest = float(torch.maximum(x.abs().max(), y.abs().max()))
    text = f"differs in {differing} of {x.numel()} elements, by at most {most:.6g}"
    numbers = {"most": most, "relative": most / largest, "rms": float(apart.square().mean().sqrt())}
    shown = {name: value if isfinite(value) else str(value) for name, value in numbers.items()}
    return {"difference": text, "elements": differing, "of": x.numel(), **shown}


def _bits_differ(x: Tensor, y: Tensor) -> Tensor:
    """Return for each element of two flat tensors whether any bit differs."""
    import torch

    one, other = (v.view(torch.uint8).reshape(len(v), -1) for v in (x, y))
    return (one != other).any(1)


def _apart(x: Tensor, y: Tensor) -> Tensor:
    """Return absolute differences in float64; for large integers, exact before rounding."""
    import torch

    if x.is_complex():
        return (x - y).abs()
    rough = (x.double() - y.double()).abs()
    if x.dtype not in (torch.int64, torch.uint64):
        return rough
    wrapped = (x.view(torch.int64) - y.view(torch.int64)).abs().double()
    return torch.where(rough < 2.0**62, wrapped, rough)
