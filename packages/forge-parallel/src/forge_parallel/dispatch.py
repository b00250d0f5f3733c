"""How rows travel to the ranks of their experts, and the outputs of the experts back.

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
        group: the ranks that take part.
        to: number of rows sent to each rank.
        of: number of rows received from each rank.
    """

    group: ProcessGroup
    to: list[int]
    of: list[int]

    def back(self) -> Hop:
        """Return the hop in the other direction."""
        return Hop(self.group, self.of, self.to)


@dataclass
class Way:
    """One all-to-all and its way back.

    Attributes:
        hop: of the rows.
        gradient: the gradient of these rows, while it travels back in the backward pass.
    """

    hop: Hop
    gradient: Tensor | None = None


class Flight(NamedTuple):
    """Rows on their way.

    Attributes:
        rows: the memory that receives them; read it only after `arrive`.
        way: the all-to-all that moves them.
    """

    rows: Tensor
    way: Way


class Order(NamedTuple):
    """A permutation of rows, and its inverse: [R] int64 each."""

    index: Tensor
    inverse: Tensor

    def back(self) -> Order:
        """Return the inverse."""
        return Order(self.inverse, self.index)


Step = tuple[Order | None, Hop]
"""A hop, and the order in which rows leave; None for that in which they are."""


class Route(NamedTuple):
    """The route of the rows of one chunk.

    Attributes:
        hops: the hops, in this order.
        arranged: the permutation from the order of arrival to the order of the experts.
        ends: [L] where the rows of each expert of this rank end.
    """

    hops: list[Step]
    arranged: Order
    ends: Tensor

    def send(self, rows: Tensor) -> Flight:
        """Send the rows, and return while the last hop is under way. Collective."""
        *first, last = self.hops
        for order, hop in first:
            rows = arrive(depart(_in(order, rows), hop))
        return depart(_in(last[0], rows), last[1])

    def serve(self, coming: Flight, experts: Experts) -> Flight:
        """Wait for the rows of `send`, apply the experts, and send the outputs back. Collective."""
        made = experts(_in(self.arranged, arrive(coming)), self.ends)
        return depart(_in(self.arranged.back(), made), coming.way.hop.back())

    def receive(self, coming: Flight) -> Tensor:
        """Wait for the outputs that `serve` has sent, and return them in the order of `send`. Collective."""
        rows = arrive(coming)
        for index, (order, hop) in enumerate(reversed(self.hops)):
            rows = arrive(depart(rows, hop.back())) if index else rows
            rows = _in(order and order.back(), rows)
        return rows


@dataclass(frozen=True)
class AllToAll:
    """Sends rows to the ranks of their experts, and the outputs of the experts back.

    Nothing is padded and nothing is dropped. Ranks first exchange the numbers of rows, which the host has to
    know. An expert, or a rank, may get none.

    Attributes:
        group: the ranks that share the experts, in the order of the experts.
        ranks: number of these ranks.
        chunks: number of parts in which the experts of a rank are served; the rows of a part travel while the
            part before is computed.
    """

    group: ProcessGroup
    ranks: int
    chunks: int = 1

    def __call__(
        self, experts: Experts, rows: Tensor, ends: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        """[R, D] -> [R, D]. Collective.

        Args:
            experts: the experts of this rank: ([rows, D], [L] ends) -> [rows, D].
            rows: sorted by expert; rows after the last end are not sent.
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
        """Return the number of rows for each (rank, chunk), and the route of each chunk. Collective.

        Args:
            sent: [ranks, C, L / C] number of rows that leave for each expert.
        """
        received = _exchanged(sent, self.group)
        to, of = numbers_of(torch.stack([sent.sum(2), received.sum(2)]))
        hops: list[list[Step]] = [
            [(None, Hop(self.group, *one))] for one in zip(_columns(to), _columns(of), strict=True)
        ]
        return [rows for each in to for rows in each], _routes(hops, received, of)


@dataclass(frozen=True, kw_only=True)
class TwoLevel(AllToAll):
    """Sends rows first inside the node, to the rank at the place of their target, then from node to node.

    Attributes:
        group: the ranks of this node.
        ranks: number of ranks that share the experts, on all nodes; ranks of a node are next to each other.
        across: the ranks at the same place of each node.
        nodes: number of nodes.
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
    """Return the route of each chunk, from its hops, the arriving rows [ranks, C, L / C], and their sums."""
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
    """Return the permutation of row blocks from the order (a, b) to (b, a); counts [A, B] are their sizes."""
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
    """Permutes rows. Its gradient is a permutation too, where indexing would sum over rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


def depart(rows: Tensor, hop: Hop) -> Flight:
    """Start to send rows. Collective."""
    way = Way(hop)
    return Flight(_Depart.apply(rows, way), way)


def arrive(flight: Flight) -> Tensor:
    """Wait for rows."""
    return _Arrive.apply(*flight)


class _Depart(torch.autograd.Function):
    """Sends rows; read its result only after `_Arrive`. In the backward pass gradients arrive here."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return _begun(rows, way.hop)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        coming, ctx.way.gradient = ctx.way.gradient, None
        return functional.wait_tensor(coming), None


class _Arrive(torch.autograd.Function):
    """Waits for rows. In the backward pass gradients depart here, while other gradients are computed."""

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
