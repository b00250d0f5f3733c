"""Gathers each matrix at one owner from the shards of ranks, and scatters results back to the shards.

A matrix is a box of a parameter: the whole parameter, one expert, or one head. Every rank that holds the same
part of the model participates, for any layout; one copy of a shard is sent, and all copies get the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from forge_parallel.mesh import Mesh, View
from forge_parallel.tensor import local_shard
from torch import Tensor

from forge_trainer.optim.newton_schulz import cost

BUCKET_ELEMENTS = 1 << 24
"""The approximate size of a bucket in elements a rank; one bucket is sent while another is computed."""


class Box(NamedTuple):
    """A part of a tensor: start and length in each dim."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def meet(self, other: Box) -> Box | None:
        """Return the intersection with another box; None if it is empty."""
        pairs = list(zip(self.start, self.shape, other.start, other.shape, strict=True))
        low = tuple(max(a, b) for a, _, b, _ in pairs)
        shape = tuple(min(a + n, b + m) - low[i] for i, (a, n, b, m) in enumerate(pairs))
        return Box(low, shape) if all(n > 0 for n in shape) else None

    def within(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the slices of the box in a tensor that starts at `origin`."""
        spans = zip(self.start, self.shape, origin, strict=True)
        return tuple(slice(a - o, a - o + n) for a, n, o in spans)


class Holding(NamedTuple):
    """The box of a parameter on a rank, and whether this rank sends it."""

    box: Box
    sends: bool


@dataclass(frozen=True)
class Matrix:
    """A matrix that one rank computes as a whole.

    Attributes:
        parameter: index of its parameter.
        box: its box in the parameter; the last two dims are rows and columns.
        owner: the rank that computes it.
    """

    parameter: int
    box: Box
    owner: int = 0

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self.box.shape[-2:]
        return rows, columns


class MatrixExchange:
    """The plan of which rank holds and computes each matrix, and of all transfers. Building it is collective.

    Args:
        parameters: parameters of two dims or more, the same on all ranks of `mesh.stage`.
        mesh: the grid of ranks.
        splits: for each parameter, the number of matrices it is cut into, and the dim of the cut; 1 for none.
        dtype: dtype of the matrices in transfer and computation.
        load: present work of each rank, updated in place; default none.

    Attributes:
        buckets: the buckets of matrices; each matrix is in one bucket.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        mesh: Mesh,
        splits: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        load: list[int] | None = None,
    ) -> None:
        self._view, self._dtype = mesh.stage, dtype
        mine = []
        for parameter in parameters:
            shard = local_shard(parameter, mesh)
            mine.append(Holding(Box(shard.offsets, tuple(shard.values.shape)), shard.is_first_copy))
        self._holdings = _everyone(mine, self._view)
        matrices = [
            Matrix(index, box)
            for index, (parameter, split) in enumerate(zip(parameters, splits, strict=True))
            for box in _boxes(tuple(parameter.shape), *split)
        ]
        self.buckets = _buckets(matrices, self._holdings, self._view.size, load)
        self._routes = [self._routed(bucket) for bucket in self.buckets]

    def gather(self, bucket: int, values: Sequence[Tensor]) -> Pending:
        """Begin to send the matrices of a bucket to their owners. Collective.

        Args:
            bucket: index in `buckets`.
            values: this rank's shard of each parameter.
        """
        there = self._routes[bucket].there
        return self._swap([values[one.parameter][one.here] for one in there.out], there, values)

    def assembled(self, bucket: int, pending: Pending) -> list[Tensor]:
        """Assemble the matrices of a bucket that this rank owns, [R, C] each."""
        received, routes = pending.wait(), self._routes[bucket]
        matrices = [received.new_zeros(box.shape) for box in routes.owned]
        for piece, values in zip(routes.there.into, _cut(received, routes.there.into), strict=True):
            matrices[piece.owned][piece.there].copy_(values)
        return [tensor.view(tensor.shape[-2:]) for tensor in matrices]

    def scatter(self, bucket: int, results: Sequence[Tensor], like: Sequence[Tensor]) -> Pending:
        """Begin to send results back to all ranks that hold a shard. Collective.

        Args:
            bucket: index in `buckets`.
            results: results of the matrices that this rank owns, in the same order.
            like: this rank's shard of each parameter.
        """
        routes = self._routes[bucket]
        of = [result.view(box.shape) for result, box in zip(results, routes.owned, strict=True)]
        return self._swap([of[one.owned][one.there] for one in routes.back.out], routes.back, like)

    def placed(self, bucket: int, pending: Pending, updates: Sequence[Tensor]) -> None:
        """Write the results of a bucket into this rank's shard of each parameter."""
        into = self._routes[bucket].back.into
        for piece, values in zip(into, _cut(pending.wait(), into), strict=True):
            updates[piece.parameter][piece.here].copy_(values)

    def _routed(self, bucket: Sequence[Matrix]) -> Routes:
        """Compute the transfers of a bucket, which are equal in each step; slow with many ranks."""
        ranks, rank = range(self._view.size), self._view.rank
        number: dict[int, int] = {}
        for matrix in bucket:
            if matrix.owner == rank:
                number[id(matrix)] = len(number)
        by_owner = [[m for m in bucket if m.owner == owner] for owner in ranks]
        owned = by_owner[rank]
        given = [self._pieces(by_owner[to], rank, number, sent=True) for to in ranks]
        taken = [self._pieces(owned, source, number, sent=True) for source in ranks]
        back = [self._pieces(owned, to, number) for to in ranks]
        placed = [self._pieces(by_owner[owner], rank, number) for owner in ranks]
        return Routes([m.box for m in owned], _way(given, taken), _way(back, placed))

    def _pieces(
        self, matrices: Sequence[Matrix], rank: int, number: Mapping[int, int], sent: bool = False
    ) -> list[Piece]:
        """Return the pieces of matrices that a rank holds, or (`sent`) only the pieces that it sends."""
        found = []
        for matrix in matrices:
            holding = self._holdings[rank][matrix.parameter]
            part = matrix.box.meet(holding.box) if holding.sends or not sent else None
            if part is not None:
                here, there = part.within(holding.box.start), part.within(matrix.box.start)
                found.append(Piece(matrix.parameter, number.get(id(matrix), -1), here, there, part.shape))
        return found

    def _swap(self, pieces: list[Tensor], way: Way, like: Sequence[Tensor]) -> Pending:
        flat = [piece.reshape(-1).to(self._dtype) for piece in pieces]
        out = torch.cat(flat) if flat else torch.empty(0, dtype=self._dtype, device=like[0].device)
        if self._view.size == 1:
            return Pending(out)
        import torch.distributed as dist

        received = out.new_empty(sum(way.of))
        work = dist.all_to_all_single(received, out, way.of, way.to, group=self._view.group, async_op=True)
        return Pending(received, work, out)


class Piece(NamedTuple):
    """The piece of one matrix on one rank.

    Attributes:
        parameter: index of the parameter.
        owned: index of the matrix among this rank's matrices of the bucket; -1 if another rank owns it.
        here: slices in the rank's shard of the parameter.
        there: slices in the matrix.
        shape: shape of the piece.
    """

    parameter: int
    owned: int
    here: tuple[slice, ...]
    there: tuple[slice, ...]
    shape: tuple[int, ...]


class Way(NamedTuple):
    """One all-to-all.

    Attributes:
        out: pieces that this rank sends, in this order.
        to: number of elements sent to each rank.
        into: pieces that this rank receives, in this order.
        of: number of elements received from each rank.
    """

    out: list[Piece]
    to: list[int]
    into: list[Piece]
    of: list[int]


class Routes(NamedTuple):
    """The transfers of a bucket.

    Attributes:
        owned: boxes of the matrices that this rank computes.
        there: the all-to-all from the shards to the owners.
        back: the all-to-all from the owners to the shards.
    """

    owned: list[Box]
    there: Way
    back: Way


def _way(out: list[list[Piece]], into: list[list[Piece]]) -> Way:
    counts = [[sum(prod(piece.shape) for piece in one) for one in side] for side in (out, into)]
    flat = [[piece for one in side for piece in one] for side in (out, into)]
    return Way(flat[0], counts[0], flat[1], counts[1])


def _cut(received: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """Cut the received buffer into pieces of their shapes."""
    parts = received.split([prod(piece.shape) for piece in pieces])
    return [part.view(piece.shape) for part, piece in zip(parts, pieces, strict=True)]


class Pending(NamedTuple):
    """Values of a transfer that may still run.

    Attributes:
        values: the received values, valid after `wait`.
        work: the collective; None if there is none.
        sent: the sent buffer, kept alive until then.
    """

    values: Tensor
    work: Any = None
    sent: Tensor | None = None

    def wait(self) -> Tensor:
        """Wait for the transfer and return the values."""
        if self.work is not None:
            self.work.wait()
        return self.values


def _everyone(mine: list[Holding], view: View) -> list[list[Holding]]:
    """Gather the holdings of each rank of a view. Collective."""
    if view.size == 1:
        return [mine]
    import torch.distributed as dist

    found: list[Any] = [None] * view.size
    dist.all_gather_object(found, mine, group=view.group)
    return found


def _boxes(shape: tuple[int, ...], pieces: int, dim: int) -> list[Box]:
    """Return the matrices of a parameter: one for each index of the leading dims, cut along one dim."""
    sides, start = list(shape[-2:]), [0, 0]
    sides[dim] //= pieces
    found = []
    for lead in product(*(range(n) for n in shape[:-2])):
        for piece in range(pieces):
            start[dim] = piece * sides[dim]
            found.append(Box((*lead, *start), (*(1 for _ in lead), *sides)))
    return found


def portions_of(parameters: Sequence[Tensor], ranks: int) -> list[list[Tensor]]:
    """Divide parameters into portions of about a bucket, by full sizes, so that all ranks agree."""
    portions: list[list[Tensor]] = []
    room = 0
    for parameter in parameters:
        if room <= 0:
            portions.append([])
            room = BUCKET_ELEMENTS * ranks
        portions[-1].append(parameter)
        room -= parameter.numel()
    return portions


def _buckets(
    matrices: list[Matrix], holdings: list[list[Holding]], size: int, load: list[int] | None = None
) -> list[list[Matrix]]:
    """Divide matrices into buckets and assign owners: the costliest matrix first, to the least loaded rank.

    A matrix that lies on a single rank stays there.
    """
    buckets: list[list[Matrix]] = [[]]
    room = BUCKET_ELEMENTS * size
    for matrix in matrices:
        if buckets[-1] and room <= 0:
            buckets.append([])
            room = BUCKET_ELEMENTS * size
        buckets[-1].append(matrix)
        room -= prod(matrix.box.shape)
    load = [0] * size if load is None else load
    return [_owned(bucket, holdings, load) for bucket in buckets if bucket]


def _owned(bucket: list[Matrix], holdings: list[list[Holding]], load: list[int]) -> list[Matrix]:
    owners: dict[int, int] = {}
    for index in sorted(range(len(bucket)), key=lambda i: (-cost(*bucket[i].size), i)):
        matrix = bucket[index]
        has = [r for r, of_rank in enumerate(holdings) if matrix.box.meet(of_rank[matrix.parameter].box)]
        owner = has[0] if len(has) == 1 else min(range(len(load)), key=lambda r: (load[r], r))
        load[owner] += cost(*matrix.size)
        owners[index] = owner
    return [Matrix(m.parameter, m.box, owners[i]) for i, m in enumerate(bucket)]
