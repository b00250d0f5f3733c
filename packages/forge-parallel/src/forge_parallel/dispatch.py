"""How rows travel to the ranks that have their experts, and what these make of them back.

R rows, D dim, E experts of all ranks, L of each, M nodes, G ranks of a node, C chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from forge_parallel.host_reads import numbers_of

Experts = Callable[[Tensor, Tensor], Tensor]


class Hop(NamedTuple):
    """One all-to-all.

    Attributes:
        group: between whom.
        to: rows to each rank.
        of: rows of each rank.
    """

    group: ProcessGroup
    to: list[int]
    of: list[int]

    def back(self) -> Hop:
        """The other way."""
        return Hop(self.group, self.of, self.to)


@dataclass
class Way:
    """One all-to-all and its way back.

    Attributes:
        hop: of the rows.
        gradient: of these rows, while it travels back in the backward pass.
    """

    hop: Hop
    gradient: Tensor | None = None


class Flight(NamedTuple):
    """Rows that travel.

    Attributes:
        rows: what arrives, not yet to be read.
        way: which they take.
    """

    rows: Tensor
    way: Way


class Order(NamedTuple):
    """Another order of rows, and the way back: [R] int64 each."""

    index: Tensor
    inverse: Tensor

    def back(self) -> Order:
        """The other way."""
        return Order(self.inverse, self.index)


Step = tuple[Order | None, Hop]
"""A hop, and the order in which rows leave; None for that in which they are."""


class Route(NamedTuple):
    """The way of the rows of one chunk.

    Attributes:
        hops: in this order.
        arranged: from the order in which they arrive to that of the experts.
        ends: [L] where the rows of each expert of this rank end.
    """

    hops: list[Step]
    arranged: Order
    ends: Tensor

    def send(self, rows: Tensor) -> Flight:
        """On the last hop, where others may be computed meanwhile. Collective."""
        *first, last = self.hops
        for order, hop in first:
            rows = arrive(depart(_in(order, rows), hop))
        return depart(_in(last[0], rows), last[1])

    def serve(self, coming: Flight, experts: Experts) -> Flight:
        """Wait for the rows of `send`, apply the experts, and send the outputs back. Collective."""
        made = experts(_in(self.arranged, arrive(coming)), self.ends)
        return depart(_in(self.arranged.back(), made), coming.way.hop.back())

    def receive(self, coming: Flight) -> Tensor:
        """Wait for what `serve` has sent back: rows in the order in which they left. Collective."""
        rows = arrive(coming)
        for index, (order, hop) in enumerate(reversed(self.hops)):
            rows = arrive(depart(rows, hop.back())) if index else rows
            rows = _in(order and order.back(), rows)
        return rows


@dataclass(frozen=True)
class AllToAll:
    """Sends rows to the ranks that have their experts, and what these make of them back.

    Nothing is padded and nothing is dropped. Ranks tell each other how many rows come, which the host has to
    know. An expert, or a rank, may have none.

    Attributes:
        group: the ranks that share the experts, in the order of the experts.
        ranks: how many they are.
        chunks: the experts of a rank are served in so many parts; the rows of a part travel while the one
            before is computed.
    """

    group: ProcessGroup
    ranks: int
    chunks: int = 1

    def __call__(
        self, experts: Experts, rows: Tensor, ends: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        """[R, D] -> [R, D]. Collective.

        Args:
            experts: of this rank: ([rows, D], [L] ends) -> [rows, D].
            rows: those of the first expert first; rows after the last end are not sent.
            ends: [E] int32, where the rows of each expert end.
            meanwhile: called while the first rows travel.
        """
        sent = torch.diff(ends, prepend=ends.new_zeros(1)).view(self.ranks, self.chunks, -1)
        lengths, routes = self.routes(sent)
        parts = rows[: sum(lengths)].split(lengths)
        outgoing = [_joined(parts[chunk :: self.chunks]) for chunk in range(self.chunks)]
        coming, returning = routes[0].send(outgoing[0]), []
        if meanwhile is not None:
            meanwhile()
        for chunk, route in enumerate(routes):
            here = coming
            if chunk + 1 < self.chunks:
                coming = routes[chunk + 1].send(outgoing[chunk + 1])
            returning.append(route.serve(here, experts))
        back = [route.receive(one) for route, one in zip(routes, returning, strict=True)]
        pieces = [one.split(lengths[chunk :: self.chunks]) for chunk, one in enumerate(back)]
        served = [pieces[at % self.chunks][at // self.chunks] for at in range(len(lengths))]
        left = rows[sum(lengths) :]
        return _joined([*(back if self.chunks == 1 else served), *([left] if len(left) else [])])

    def routes(self, sent: Tensor) -> tuple[list[int], list[Route]]:
        """How many rows leave for each (rank, chunk), and the route of each chunk. Collective.

        Args:
            sent: [ranks, C, L / C] how many rows leave for each expert.
        """
        received = _exchanged(sent, self.group)
        to, of = numbers_of(torch.stack([sent.sum(2), received.sum(2)]))
        hops: list[list[Step]] = [
            [(None, Hop(self.group, *one))] for one in zip(_columns(to), _columns(of), strict=True)
        ]
        return [rows for each in to for rows in each], _routes(hops, received, of)


@dataclass(frozen=True, kw_only=True)
class TwoLevel(AllToAll):
    """Rows travel inside of a node to the rank at the place of their target, then from node to node.

    Attributes:
        group: the ranks of this node.
        ranks: how many share the experts, of all nodes; those of a node are next to each other.
        across: the ranks at the same place of each node.
        nodes: how many they are.
    """

    across: ProcessGroup
    nodes: int

    def routes(self, sent: Tensor) -> tuple[list[int], list[Route]]:
        """See `AllToAll.routes`."""
        leaving = sent.unflatten(0, (self.nodes, -1))  # [M, G, C, L / C], by target
        between = _exchanged(leaving.transpose(0, 1), self.group)  # [G, M, ...], by source and target's node
        received = _exchanged(between.transpose(0, 1), self.across)  # [M, G, ...], by source
        counts = [leaving.sum(3), between.sum(3).transpose(0, 1), received.sum(3)]
        first, second, last = numbers_of(torch.stack(counts))
        hops = []
        for chunk in range(self.chunks):
            out, via, into = ([[place[chunk] for place in node] for node in x] for x in (first, second, last))
            inside = Hop(self.group, _columns_summed(out), _columns_summed(via))
            outside = Hop(self.across, [sum(node) for node in via], [sum(node) for node in into])
            by_place = _regrouped(leaving[:, :, chunk].sum(2), sum(inside.to))
            by_node = _regrouped(between[:, :, chunk].sum(2), sum(outside.to))
            hops.append([(by_place, inside), (by_node, outside)])
        to, of = ([place for node in x for place in node] for x in (first, last))
        return [rows for each in to for rows in each], _routes(hops, received.flatten(0, 1), of)


def _routes(hops: list[list[Step]], received: Tensor, of: list[list[int]]) -> list[Route]:
    """The route of each chunk, from its hops, [ranks, C, L / C] rows that arrive, and their sums over L."""
    chunks, each = received.shape[1:]
    totals = _columns_summed(of)
    routes = []
    for chunk, steps in enumerate(hops):
        arriving = received[:, chunk]
        local = F.pad(arriving.sum(0), (chunk * each, (chunks - chunk - 1) * each))
        arranged = _regrouped(arriving, totals[chunk])
        routes.append(Route(steps, arranged, local.cumsum(0).to(received.dtype)))
    return routes


def _regrouped(counts: Tensor, total: int) -> Order:
    """From blocks of rows in the order (a, b) to the order (b, a); counts [A, B] of the rows of each."""
    a, b = counts.shape
    places = torch.arange(b, device=counts.device).repeat(a)
    index = places.repeat_interleave(counts.flatten(), output_size=total).sort(stable=True).indices
    inverse = torch.empty_like(index)
    inverse[index] = torch.arange(total, device=counts.device)
    return Order(index, inverse)


def _columns(table: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*table, strict=True)]


def _columns_summed(table: list[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*table, strict=True)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _in(order: Order | None, rows: Tensor) -> Tensor:
    return rows if order is None else _Permute.apply(rows, *order)


class _Permute(torch.autograd.Function):
    """Rows in another order. Its gradient is no sum over rows, which indexing would make."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


def depart(rows: Tensor, hop: Hop) -> Flight:
    """Rows begin to travel. Collective."""
    way = Way(hop)
    return Flight(_Depart.apply(rows, way), way)


def arrive(flight: Flight) -> Tensor:
    """Wait for rows."""
    return _Arrive.apply(*flight)


class _Depart(torch.autograd.Function):
    """What it returns may be read after `_Arrive`. In the backward pass gradients arrive here."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return _begun(rows, way.hop)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        coming, ctx.way.gradient = ctx.way.gradient, None
        return functional.wait_tensor(coming), None


class _Arrive(torch.autograd.Function):
    """In the backward pass gradients depart here, while others of what was computed meanwhile are made."""

    @staticmethod
    def forward(ctx: Any, coming: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return functional.wait_tensor(coming)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.way.gradient = _begun(gradient, ctx.way.hop.back())
        return gradient, None  # has the shape that is expected; `_Depart` gives what arrives


def _begun(rows: Tensor, hop: Hop) -> Tensor:
    """Start an all-to-all; torch waits for the result through its memory."""
    coming = functional.all_to_all_single(rows.contiguous(), hop.of, hop.to, hop.group)
    return getattr(coming, "elem", coming)  # without the wrapper, which would wait at the first use


def _exchanged(counts: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange one row with each rank: [ranks, ...] sent -> [ranks, ...] received."""
    return functional.wait_tensor(functional.all_to_all_single(counts.contiguous(), None, None, group))
