"""Collectives that autograd differentiates: each is the adjoint of another one of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed import ProcessGroup

from forge_parallel import capabilities


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup, wide: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.wide = dim, group, wide
        return _all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        summed = torch.promote_types(gradient.dtype, torch.float32) if ctx.wide else gradient.dtype
        total = _reduce_scatter(gradient.to(summed), ctx.dim, ctx.group)
        return total.to(gradient.dtype), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int, join: int, group: ProcessGroup) -> Tensor:
        ctx.cut, ctx.join, ctx.group = cut, join, group
        return _all_to_all(x, cut, join, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _all_to_all(gradient, ctx.join, ctx.cut, ctx.group), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _all_gather(gradient, ctx.dim, ctx.group), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, wide: bool) -> Tensor:
        ctx.group, ctx.wide = group, wide
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        summed = torch.promote_types(gradient.dtype, torch.float32) if ctx.wide else gradient.dtype
        total = functional.all_reduce(gradient.to(summed).contiguous(), "sum", ctx.group)
        return functional.wait_tensor(total).to(gradient.dtype), None, None


def _reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return functional.wait_tensor(
        capabilities.functional("reduce_scatter")(x.contiguous(), "sum", dim, group)
    )


def _all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return functional.wait_tensor(capabilities.functional("all_gather")(x.contiguous(), dim, group))


def _all_to_all(x: Tensor, cut: int, join: int, group: ProcessGroup) -> Tensor:
    parts = x.unflatten(cut, (group.size(), -1)).movedim(cut, 0).contiguous()
    received = functional.wait_tensor(functional.all_to_all_single(parts, None, None, group))
    return received.movedim(0, join).flatten(join, join + 1)


def all_gather(x: Tensor, dim: int, group: ProcessGroup, wide: bool = False) -> Tensor:
    """Return the shards of all ranks along `dim`; the gradient is summed over ranks and sharded. Collective.

    Args:
        x: this rank's shard.
        dim: the dim to concatenate along.
        group: the ranks.
        wide: sum the gradient in float32.
    """
    return _AllGather.apply(x, dim, group, wide)


def all_to_all(x: Tensor, cut: int, join: int, group: ProcessGroup) -> Tensor:
    """Return this rank's even part of dim `cut`, joined over all ranks along dim `join`. Collective."""
    return _AllToAll.apply(x, cut, join, group)


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's shard along `dim` of the sum over ranks; the gradient is gathered. Collective."""
    return _ReduceScatter.apply(x, dim, group)


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over ranks, which all ranks use alike; the gradient passes unchanged. Collective."""
    return _AllReduce.apply(x, group)


def copy_to_ranks(x: Tensor, group: ProcessGroup, wide: bool = True) -> Tensor:
    """Return `x`, which each rank uses differently; the gradient is summed over the ranks. Collective.

    Args:
        x: equal on all ranks.
        group: the ranks.
        wide: sum the gradient in float32, as for a parameter; otherwise in its own format, as the forward
            pass sums the parts of an activation.
    """
    return _Copy.apply(x, group, wide)
