"""The norm of all gradients over all ranks, and clipping by it, without waiting for the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from forge_parallel.tensor import is_dtensor, local_part


@torch.no_grad()
def global_norm(parameters: Iterable[Tensor]) -> Tensor:
    """2-norm of all gradients together. Collective.

    Args:
        parameters: plain or sharded, over one mesh or several; those without a gradient count as zero.

    Returns:
        [] float32 (float64 for float64 gradients), equal on every rank.
    """
    by_layout: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            by_layout[_layout(parameter.grad)].append(local_part(parameter.grad))
    squares = []
    for layout, gradients in by_layout.items():
        wide = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in gradients]
        square = torch.nn.utils.get_total_norm(wide).square()
        if layout is not None:
            import torch.distributed as dist

            device_mesh, axes = layout
            for axis in axes:
                dist.all_reduce(square, group=device_mesh.get_group(axis))
        squares.append(square)
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def _layout(gradient: Tensor) -> Any:
    """The mesh and the axes over which a gradient is cut; None when it is whole."""
    if not is_dtensor(gradient):
        return None
    placements = gradient.placements  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        raise AssertionError("a gradient was not reduced before its norm was taken")
    axes = tuple(axis for axis, placement in enumerate(placements) if placement.is_shard())
    return gradient.device_mesh, axes  # type: ignore[attr-defined]


@torch.no_grad()
def clip_(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale all gradients in place by min(1, max_norm / norm).

    Args:
        parameters: those of `global_norm`.
        max_norm: what the norm is at most afterwards.
        norm: from `global_norm`.
    """
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
