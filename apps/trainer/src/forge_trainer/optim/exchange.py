"""Whole matrices, each at one owner, from the parts that ranks hold; and results back to where parts are.

A matrix is a box of a parameter: all of it, one expert, or one head. Every rank that holds the same part of
the model takes part, whatever layouts its parameters have; of copies, one is sent, and all get the result.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        """What both have in common."""
        pairs = list(zip(self.start, self.shape, other.start, other.shape, strict=True))
        low = tuple(max(a, b) for a, _, b, _ in pairs)
        shape = tuple(min(a + n, b + m) - low[i] for i, (a, n, b, m) in enumerate(pairs))
        return Box(low, shape) if all(n > 0 for n in shape) else None

    def of(self, tensor: Tensor, origin: tuple[int, ...]) -> Tensor:
        """The values in a tensor that starts at `origin`."""
        spans = zip(self.start, self.shape, origin, strict=True)
        return tensor[tuple(slice(a - o, a - o + n) for a, n, o in spans)]


class Holding(NamedTuple):
    """What a rank holds of a parameter, and whether it is the one that sends it."""

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


class Exchange:
    """Who holds what, who works on what, and in which order it travels. Collective to make.

    Args:
        parameters: the same on all ranks of `mesh.stage`, of two dims or more.
        mesh: the grid of ranks.
        splits: into how many matrices a parameter is cut, and along which of its dims; 1 for none.
        dtype: in which matrices travel and are worked on.

    Attributes:
        buckets: the matrices, each in one bucket.
    """

    def __init__(
        self, parameters: Sequence[Tensor], mesh: Mesh, splits: Sequence[tuple[int, int]], dtype: torch.dtype
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
        self.buckets = _buckets(matrices, self._holdings, self._view.size)

    def gather(self, bucket: Sequence[Matrix], values: Sequence[Tensor]) -> Pending:
        """Begin to bring the matrices of a bucket to their owners. Collective.

        Args:
            bucket: one of `buckets`.
            values: this rank's part of each parameter.
        """
        size, rank = self._view.size, self._view.rank
        send = [
            [
                part.of(values[m.parameter], self._box(rank, m).start)
                for m, part in self._sent(bucket, rank, to)
            ]
            for to in range(size)
        ]
        counts = [_elements(self._sent(bucket, at, rank)) for at in range(size)]
        return self._swap(send, counts, values)

    def assembled(self, bucket: Sequence[Matrix], pending: Pending) -> list[Tensor]:
        """The matrices of a bucket that this rank owns, [R, C] each."""
        rank, received = self._view.rank, pending.wait()
        whole = {id(m): received.new_zeros(m.box.shape) for m in bucket if m.owner == rank}
        at = 0
        for source in range(self._view.size):
            for matrix, part in self._sent(bucket, source, rank):
                count = prod(part.shape)
                part.of(whole[id(matrix)], matrix.box.start).copy_(received[at : at + count].view(part.shape))
                at += count
        return [tensor.view(tensor.shape[-2:]) for tensor in whole.values()]

    def scatter(self, bucket: Sequence[Matrix], results: Sequence[Tensor], like: Sequence[Tensor]) -> Pending:
        """Begin to bring results back to all ranks that hold a part. Collective.

        Args:
            bucket: one of `buckets`.
            results: of the matrices that this rank owns, in their order.
            like: this rank's part of each parameter.
        """
        rank = self._view.rank
        owned = [m for m in bucket if m.owner == rank]
        of = {id(m): result.view(m.box.shape) for m, result in zip(owned, results, strict=True)}
        send = [
            [part.of(of[id(m)], m.box.start) for m, part in self._held(owned, to)]
            for to in range(self._view.size)
        ]
        owners = range(self._view.size)
        counts = [_elements(self._held([m for m in bucket if m.owner == at], rank)) for at in owners]
        return self._swap(send, counts, like)

    def placed(self, bucket: Sequence[Matrix], pending: Pending, updates: Sequence[Tensor]) -> None:
        """Write the results of a bucket into this rank's part of each parameter."""
        rank, received, at = self._view.rank, pending.wait(), 0
        for owner in range(self._view.size):
            for matrix, part in self._held([m for m in bucket if m.owner == owner], rank):
                count = prod(part.shape)
                here = part.of(updates[matrix.parameter], self._box(rank, matrix).start)
                here.copy_(received[at : at + count].view(part.shape))
                at += count

    def _box(self, rank: int, matrix: Matrix) -> Box:
        return self._holdings[rank][matrix.parameter].box

    def _held(self, matrices: Sequence[Matrix], rank: int) -> list[tuple[Matrix, Box]]:
        """What a rank holds of matrices."""
        met = ((m, m.box.meet(self._box(rank, m))) for m in matrices)
        return [(m, part) for m, part in met if part is not None]

    def _sent(self, bucket: Sequence[Matrix], source: int, to: int) -> list[tuple[Matrix, Box]]:
        """What a rank sends to an owner."""
        sends = [m for m in bucket if m.owner == to and self._holdings[source][m.parameter].sends]
        return self._held(sends, source)

    def _swap(self, send: list[list[Tensor]], counts: list[int], like: Sequence[Tensor]) -> Pending:
        pieces = [piece.reshape(-1).to(self._dtype) for row in send for piece in row]
        out = torch.cat(pieces) if pieces else torch.empty(0, dtype=self._dtype, device=like[0].device)
        if self._view.size == 1:
            return Pending(out)
        import torch.distributed as dist

        received = out.new_empty(sum(counts))
        given = [sum(piece.numel() for piece in row) for row in send]
        work = dist.all_to_all_single(received, out, counts, given, group=self._view.group, async_op=True)
        return Pending(received, work, out)


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
    """What each rank of a view holds. Collective."""
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


def _elements(parts: list[tuple[Matrix, Box]]) -> int:
    return sum(prod(part.shape) for _, part in parts)


def _buckets(matrices: list[Matrix], holdings: list[list[Holding]], size: int) -> list[list[Matrix]]:
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
    load = [0] * size
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
