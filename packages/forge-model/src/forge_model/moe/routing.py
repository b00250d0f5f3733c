"""Pairs of tokens and experts, and rows sorted by expert. N tokens, E experts, R pairs, K slots, D dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Routing(NamedTuple):
    """Pairs of a token and an expert that serves it.

    Attributes:
        tokens: [R] int64.
        experts: [R] int64; E for a dropped pair.
        weights: [R] weights of the expert outputs, in the dtype of the router.
        slots: number K of pairs per token if the pairs of token t are t K to t K + K - 1; 0 for any order.
        drops: whether pairs may be dropped.
    """

    tokens: Tensor
    experts: Tensor
    weights: Tensor
    slots: int = 0
    drops: bool = False


class ByExpert(NamedTuple):
    """Rows sorted by the experts that serve them.

    Attributes:
        rows: [R, D]; rows that no expert serves come last.
        ends: [E] int32, where the rows of each expert end.
        order: [R] int64, the pair of each row.
        inverse: [R] int64, the row of each pair.
    """

    rows: Tensor
    ends: Tensor
    order: Tensor
    inverse: Tensor


def one_per_slot(experts: Tensor, weights: Tensor) -> Routing:
    """Build the routing from experts and weights [N, K] of each token."""
    tokens, slots = experts.shape
    index = torch.arange(tokens, device=experts.device).repeat_interleave(slots, output_size=tokens * slots)
    return Routing(index, experts.flatten(), weights.flatten(), slots)


def without(routing: Routing, padding: Tensor, num_experts: int) -> Routing:
    """Drop all pairs of padding tokens, [B, T] bool."""
    kept = ~padding.flatten()[routing.tokens]
    return routing._replace(
        experts=routing.experts.where(kept, num_experts), weights=routing.weights.where(kept, 0), drops=True
    )


def within_capacity(
    routing: Routing, num_experts: int, capacity: int | Tensor, by_weight: bool = False
) -> Routing:
    """Keep the first `capacity` pairs of each expert and drop the rest.

    Args:
        routing: routing with pairs in the order of tokens.
        num_experts: E.
        capacity: most pairs that an expert serves.
        by_weight: whether the heaviest pairs of an expert come first, earlier ones first among equals. If
            not, earlier tokens come first, so that a token never loses its expert to a later one.
    """
    if by_weight:
        heaviest = routing.weights.detach().argsort(descending=True, stable=True)
        sorted_, order = routing.experts[heaviest].sort(stable=True)
        order = heaviest[order]
    else:
        sorted_, order = routing.experts.sort(stable=True)
    positions = torch.arange(len(order), device=order.device)
    starts = torch.searchsorted(sorted_, torch.arange(num_experts + 1, device=order.device))
    kept = torch.empty_like(order, dtype=torch.bool)
    kept[order] = positions - starts[sorted_] < capacity
    return routing._replace(
        experts=routing.experts.where(kept, num_experts),
        weights=routing.weights.where(kept, 0),
        drops=True,
    )


def by_expert(x: Tensor, routing: Routing, num_experts: int) -> ByExpert:
    """Copy the rows of tokens [N, D] in the order of the experts. Waits for no device."""
    sorted_, order = routing.experts.sort(stable=True)
    places = torch.arange(len(order), device=x.device)
    inverse = torch.empty_like(order)
    inverse[order] = places
    experts = torch.arange(num_experts, device=x.device)
    ends = torch.searchsorted(sorted_, experts, right=True).int()
    if routing.slots:
        rows = _Take.apply(x, order, inverse, routing.slots)
    else:
        rows = x.index_select(0, routing.tokens[order])
    return ByExpert(rows, ends, order, inverse)


def counts_of(ends: Tensor) -> Tensor:
    """Return the number of rows of each expert, [E], from the ends of their rows."""
    return torch.diff(ends, prepend=ends.new_zeros(1))


def combine(out: Tensor, sorted_: ByExpert, routing: Routing, tokens: int) -> Tensor:
    """Return the weighted sum of the expert outputs of each token.

    Args:
        out: [R, D], in the order of `sorted_`.
        sorted_: from `by_expert`.
        routing: the routing that `sorted_` was made from.
        tokens: N.

    Returns:
        [N, D].
    """
    if routing.slots:
        weights = routing.weights.to(out.dtype).view(tokens, routing.slots)
        return _Combine.apply(out, weights, sorted_.order, sorted_.inverse)
    weighted = out * routing.weights.to(out.dtype)[sorted_.order, None]
    return out.new_zeros(tokens, out.shape[1]).index_add(0, routing.tokens[sorted_.order], weighted)


def serve(
    experts: Callable[[Tensor, Tensor], Tensor], x: Tensor, routing: Routing, num_experts: int
) -> Tensor:
    """Let experts serve tokens.

    Args:
        experts: ([R, D] rows, [E] ends) -> [R, D]; see `Experts`.
        x: [N, D].
        routing: routing of these tokens.
        num_experts: E.

    Returns:
        [N, D], weighted sums.
    """
    sorted_ = by_expert(x, routing, num_experts)
    rows = sorted_.rows
    if not routing.drops:
        return combine(experts(rows, sorted_.ends), sorted_, routing, len(x))
    served = torch.arange(len(rows), device=x.device)[:, None] < sorted_.ends[-1]
    out = experts(rows.where(served, 0), sorted_.ends).where(served, 0)
    return combine(out, sorted_, routing, len(x))


class _Take(torch.autograd.Function):
    """Rows of tokens, one for each of their pairs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, slots: int) -> Tensor:
        ctx.save_for_backward(inverse.view(-1, slots))
        return x.index_select(0, order // slots)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _summed(gradient, ctx.saved_tensors[0]), None, None, None


class _Combine(torch.autograd.Function):
    """Weighted sums of the rows of each token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, inverse)
        return _summed(rows, inverse.view_as(weights), weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weights, order, inverse = ctx.saved_tensors
        slots, flat = weights.shape[1], weights.flatten()
        through, sums = torch.empty_like(rows), torch.empty_like(flat)
        # on a CPU as many rows at a time as there are tokens, which stay in its cache
        size = max(1, len(gradient if rows.device.type == "cpu" else rows))
        parts = (one.split(size) for one in (rows, order, through, sums))
        for made, pairs, into, of_pairs in zip(*parts, strict=True):
            torch.index_select(gradient, 0, pairs // slots, out=into)
            torch.sum(made * into, 1, out=of_pairs)
            into.mul_(flat[pairs, None])
        return through, sums[inverse].view_as(weights), None, None


def _summed(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return [N, D], the sum over k of weights[n, k] rows[places[n, k]], in a fixed order of k.

    Goes slot by slot on a CPU, whose cache then holds the data; uses few kernels elsewhere.
    """
    if rows.device.type != "cpu":
        each = rows.index_select(0, places.flatten()).unflatten(0, places.shape)
        return each.sum(1) if weights is None else torch.bmm(weights.unsqueeze(1), each).squeeze(1)
    total = rows.new_zeros(len(places), rows.shape[1])
    for slot, index in enumerate(places.unbind(1)):
        part = rows.index_select(0, index)
        total = total.add_(part) if weights is None else total.addcmul_(part, weights[:, slot, None])
    return total
