"""Collectives that autograd goes through: each is the adjoint of another one of them."""

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
    """The shards of all ranks along `dim`; the gradient is summed over ranks and cut again. Collective.

    Args:
        x: this rank's shard.
        dim: along which they are put together.
        group: the ranks.
        wide: sum the gradient in float32.
    """
    return _AllGather.apply(x, dim, group, wide)


def all_to_all(x: Tensor, cut: int, join: int, group: ProcessGroup) -> Tensor:
    """Each rank's even part of dim `cut`, of what all ranks have along dim `join`. Collective."""
    return _AllToAll.apply(x, cut, join, group)


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's shard along `dim` of the sum over ranks; the gradient is gathered. Collective."""
    return _ReduceScatter.apply(x, dim, group)


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over ranks, which all of them use alike; the gradient passes. Collective."""
    return _AllReduce.apply(x, group)


def copy_to_ranks(x: Tensor, group: ProcessGroup, wide: bool = True) -> Tensor:
    """The same values, of which ranks make different use; the gradient is summed over them. Collective.

    Args:
        x: equal on all ranks.
        group: the ranks.
        wide: sum the gradient in float32, as that of a parameter; otherwise in its own format, in which the
            parts of an activation are summed in the forward pass.
    """
    return _Copy.apply(x, group, wide)
