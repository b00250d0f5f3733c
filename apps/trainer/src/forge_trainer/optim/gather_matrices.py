"""Whole matrices, each at one owner, from the parts that ranks hold; and results back to where parts are.

A matrix is a box of a parameter: all of it, one expert, or one head. Every rank that holds the same part of
the model takes part, whatever layouts its parameters have; of copies, one is sent, and all get the result.
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
"""Matrices travel in buckets of about so many elements a rank: some move while others are worked on."""


class Box(NamedTuple):
    """A part of a tensor: where it starts, and how long it is, in each dim."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def meet(self, other: Box) -> Box | None:
        """The intersection with another box; None if it is empty."""
        pairs = list(zip(self.start, self.shape, other.start, other.shape, strict=True))
        low = tuple(max(a, b) for a, _, b, _ in pairs)
        shape = tuple(min(a + n, b + m) - low[i] for i, (a, n, b, m) in enumerate(pairs))
        return Box(low, shape) if all(n > 0 for n in shape) else None

    def within(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """Its place in a tensor that starts at `origin`."""
        spans = zip(self.start, self.shape, origin, strict=True)
        return tuple(slice(a - o, a - o + n) for a, n, o in spans)


class Holding(NamedTuple):
    """The box of a parameter on a rank, and whether this rank sends it."""

    box: Box
    sends: bool


@dataclass(frozen=True)
class Matrix:
    """A matrix that is worked on as a whole.

    Attributes:
        parameter: its index.
        box: where it lies; its last two dims are rows and columns.
        owner: the rank that works on it.
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
    """Which rank holds each matrix, which computes it, and in which order pieces travel. Collective to make.

    Args:
        parameters: the same on all ranks of `mesh.stage`, of two dims or more.
        mesh: the grid of ranks.
        splits: into how many matrices a parameter is cut, and along which of its dims; 1 for none.
        dtype: in which matrices travel and are worked on.
        load: what each rank has to do already, kept up to date; nothing, if absent.

    Attributes:
        buckets: the matrices, each in one bucket.
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
        """Begin to bring the matrices of a bucket to their owners. Collective.

        Args:
            bucket: index of one of `buckets`.
            values: this rank's part of each parameter.
        """
        there = self._routes[bucket].there
        return self._swap([values[one.parameter][one.here] for one in there.out], there, values)

    def assembled(self, bucket: int, pending: Pending) -> list[Tensor]:
        """The matrices of a bucket that this rank owns, [R, C] each."""
        received, routes = pending.wait(), self._routes[bucket]
        whole = [received.new_zeros(box.shape) for box in routes.owned]
        for piece, values in zip(routes.there.into, _cut(received, routes.there.into), strict=True):
            whole[piece.owned][piece.there].copy_(values)
        return [tensor.view(tensor.shape[-2:]) for tensor in whole]

    def scatter(self, bucket: int, results: Sequence[Tensor], like: Sequence[Tensor]) -> Pending:
        """Begin to bring results back to all ranks that hold a part. Collective.

        Args:
            bucket: index of one of `buckets`.
            results: of the matrices that this rank owns, in their order.
            like: this rank's part of each parameter.
        """
        routes = self._routes[bucket]
        of = [result.view(box.shape) for result, box in zip(results, routes.owned, strict=True)]
        return self._swap([of[one.owned][one.there] for one in routes.back.out], routes.back, like)

    def placed(self, bucket: int, pending: Pending, updates: Sequence[Tensor]) -> None:
        """Write the results of a bucket into this rank's part of each parameter."""
        into = self._routes[bucket].back.into
        for piece, values in zip(into, _cut(pending.wait(), into), strict=True):
            updates[piece.parameter][piece.here].copy_(values)

    def _routed(self, bucket: Sequence[Matrix]) -> Routes:
        """Where what goes in a bucket; takes a while with many ranks, and is the same in each step."""
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
        """The pieces of matrices that a rank holds, or only those that it sends."""
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
        parameter: its index.
        owned: which of the matrices of a bucket that this rank owns; -1 for none.
        here: where in the part of the parameter that the rank holds.
        there: where in the matrix.
        shape: of both.
    """

    parameter: int
    owned: int
    here: tuple[slice, ...]
    there: tuple[slice, ...]
    shape: tuple[int, ...]


class Way(NamedTuple):
    """One all-to-all.

    Attributes:
        out: what this rank gives, in this order.
        to: how many elements to each rank.
        into: what it gets, in this order.
        of: how many elements of each rank.
    """

    out: list[Piece]
    to: list[int]
    into: list[Piece]
    of: list[int]


class Routes(NamedTuple):
    """The ways of a bucket.

    Attributes:
        owned: the matrices that this rank works on.
        there: to the owners.
        back: to all that hold a part.
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
    """Values that are on their way.

    Attributes:
        values: valid after `wait`.
        work: the collective; None if there is none.
        sent: kept alive until then.
    """

    values: Tensor
    work: Any = None
    sent: Tensor | None = None

    def wait(self) -> Tensor:
        """The values."""
        if self.work is not None:
            self.work.wait()
        return self.values


def _everyone(mine: list[Holding], view: View) -> list[list[Holding]]:
    """The holdings of each rank of a view. Collective."""
    if view.size == 1:
        return [mine]
    import torch.distributed as dist

    found: list[Any] = [None] * view.size
    dist.all_gather_object(found, mine, group=view.group)
    return found


def _boxes(shape: tuple[int, ...], pieces: int, dim: int) -> list[Box]:
    """The matrices of a parameter: one for each index of the leading dims, cut into pieces along one dim."""
    sides, start = list(shape[-2:]), [0, 0]
    sides[dim] //= pieces
    found = []
    for lead in product(*(range(n) for n in shape[:-2])):
        for piece in range(pieces):
            start[dim] = piece * sides[dim]
            found.append(Box((*lead, *start), (*(1 for _ in lead), *sides)))
    return found


def portions_of(parameters: Sequence[Tensor], ranks: int) -> list[list[Tensor]]:
    """Cut parameters into portions of about a bucket, by their full sizes: the same on all ranks."""
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
    """Cut matrices into buckets, and give each an owner: the most costly first, to who has least to do.

    A matrix that lies on one rank alone stays there.
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
        has = [r for r, held in enumerate(holdings) if matrix.box.meet(held[matrix.parameter].box)]
        owner = has[0] if len(has) == 1 else min(range(len(load)), key=lambda r: (load[r], r))
        load[owner] += cost(*matrix.size)
        owners[index] = owner
    return [Matrix(m.parameter, m.box, owners[i]) for i, m in enumerate(bucket)]
