"""Counts the FLOPs of an operation from its shapes, as `torch.utils.flop_counter` does."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the FLOPs of one operation; 0 for element-wise operations and copies."""
    packet = func._overloadpacket
    if packet is torch.ops.aten._grouped_mm:
        return _grouped(args[0], args[1], out)
    if (formula := flop_registry.get(packet)) is None:
        return 0.0
    return float(formula(*args, **kwargs, out_val=out))


def _grouped(left: Any, right: Any, out: Any) -> float:
    """Count [R, I] by [E, I, O]: every row once; or [I, R] by [R, O]: a sum over rows for each group."""
    if left.ndim == 2 and right.ndim == 3:
        return 2.0 * left.shape[0] * right.shape[-2] * right.shape[-1]
    if left.ndim == 2:
        return 2.0 * left.shape[0] * left.shape[1] * right.shape[1]
    return 2.0 * out.numel() * left.shape[-1]
