"""Boxes: which rank wrote which part of each tensor, and which parts a reader needs. Imports no torch.

Legend: R ranks, K tensors, B boxes of one tensor, D dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import msgspec
import numpy as np

from forge_ckpt.error import CheckpointError

MAX_CELLS = 1 << 22
"""Cells of the grid that the edges of all boxes make; more than any layout of ours has."""

Shape = tuple[int, ...]


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """How one or more tensors of the same shape are cut.

    Attributes:
        ranks: the writer of each box, ascending, each rank at most once.
        starts: [B][D] index of the first element of each box.
        sizes: [B][D] extents of each box.
    """

    ranks: list[int]
    starts: list[Shape]
    sizes: list[Shape]


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor.

    Attributes:
        dtype: name in torch, e.g. float32.
        shape: shape of the whole tensor.
        layout: index of its layout.
    """

    dtype: str
    shape: Shape
    layout: int = 0


class Part(msgspec.Struct, frozen=True):
    """The boxes of tensors that one rank wrote.

    Attributes:
        boxes: start and extents of the different boxes that it wrote.
        box_of: [K] int32, for each of its tensors in order of names: 0 for nothing, else 1 + its box.
    """

    boxes: list[tuple[Shape, Shape]]
    box_of: bytes


def part_of(names: Sequence[str], written: Mapping[str, tuple[Shape, Shape]]) -> Part:
    """Return the `Part` of a rank.

    Args:
        names: all tensors that it holds, sorted.
        written: start and extents of the boxes it wrote of some of them.
    """
    known: dict[tuple[Shape, Shape], int] = {}
    ids = [known.setdefault(written[name], len(known) + 1) if name in written else 0 for name in names]
    return Part(list(known), np.array(ids, dtype="<i4").tobytes())


def merge(
    tables: Sequence[Mapping[str, Entry]], table_of: Sequence[int], parts: Sequence[Part]
) -> tuple[dict[str, Entry], list[Layout]]:
    """Merge the parts of all ranks.

    Args:
        tables: the different sets of tensors that ranks hold.
        table_of: [R] the table of each rank.
        parts: [R] the part that each rank wrote.

    Returns:
        All tensors, and the layouts that they refer to.

    Raises:
        CheckpointError: tensors of one name differ, or the boxes of one do not make it up exactly.
    """
    entries: dict[str, Entry] = {}
    for table in tables:
        for name, entry in table.items():
            known = entries.setdefault(name, entry)
            if known != entry:
                raise CheckpointError(
                    f"{name} is {entry.dtype} {list(entry.shape)} on one rank, and {known.dtype} "
                    f"{list(known.shape)} on another; one name is one tensor on all ranks"
                )
    names = sorted(entries)
    column = {name: index for index, name in enumerate(names)}
    columns = [np.array([column[name] for name in sorted(table)], dtype=np.int64) for table in tables]
    box_of = np.zeros((len(parts), len(names)), dtype=np.int32)
    for rank, part in enumerate(parts):
        box_of[rank, columns[table_of[rank]]] = np.frombuffer(part.box_of, dtype="<i4")
    layouts: list[Layout] = []
    seen: dict[tuple[bytes, Shape], int] = {}
    for index, name in enumerate(names):
        shape = entries[name].shape
        key = (box_of[:, index].tobytes(), shape)
        if key not in seen:
            seen[key] = len(layouts)
            layouts.append(_layout(box_of[:, index], parts))
            require_cover(name, shape, layouts[-1])
        entries[name] = Entry(entries[name].dtype, shape, seen[key])
    return entries, layouts


def _layout(box_of: np.ndarray, parts: Sequence[Part]) -> Layout:
    ranks = np.flatnonzero(box_of).tolist()
    boxes = [parts[rank].boxes[int(box_of[rank]) - 1] for rank in ranks]
    return Layout(ranks, [start for start, _ in boxes], [size for _, size in boxes])


def require_cover(name: str, shape: Shape, layout: Layout) -> None:
    """Check that boxes lie in a tensor, do not overlap, and leave nothing out.

    Raises:
        CheckpointError: they do not.
    """
    problem = f"the boxes of {name}, {list(shape)}, do not make it up:"
    if not len(layout.ranks) == len(layout.starts) == len(layout.sizes):
        raise CheckpointError(f"{problem} their number is not clear")
    for start, size in zip(layout.starts, layout.sizes, strict=True):
        if not len(start) == len(size) == len(shape) or not all(
            a >= 0 and n > 0 and a + n <= length for a, n, length in zip(start, size, shape, strict=True)
        ):
            raise CheckpointError(f"{problem} one starts at {start} and has {size}")
    if sum(prod(size) for size in layout.sizes) != prod(shape):
        raise CheckpointError(
            f"{problem} they hold {sum(map(prod, layout.sizes))} elements, not {prod(shape)}"
        )
    if len(layout.sizes) > 1 and _overlap(layout):
        raise CheckpointError(f"{problem} some overlap")


def _overlap(layout: Layout) -> bool:
    """Whether some boxes overlap, by counting them on the grid of all their edges."""
    starts, sizes = np.array(layout.starts), np.array(layout.sizes)
    edges = [np.unique([starts[:, d], starts[:, d] + sizes[:, d]]) for d in range(starts.shape[1])]
    cells = [len(edge) - 1 for edge in edges]
    if prod(cells) > MAX_CELLS:
        return True
    low = [np.searchsorted(edge, starts[:, d]) for d, edge in enumerate(edges)]
    high = [np.searchsorted(edge, starts[:, d] + sizes[:, d]) for d, edge in enumerate(edges)]
    count = np.zeros(cells, dtype=np.int32)
    for box in range(len(starts)):
        count[tuple(slice(a[box], b[box]) for a, b in zip(low, high, strict=True))] += 1
    return bool((count > 1).any())


class Cuts:
    """Finds the boxes of a layout that meet a box; caches the answers."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._layouts = layouts
        self._answers: dict[tuple[int, Shape, Shape], list[tuple[int, int]]] = {}

    def meeting(self, layout: int, start: Shape, size: Shape) -> list[tuple[int, int]]:
        """Return index and rank of each box that overlaps the box at `start` of extents `size`."""
        key = (layout, start, size)
        if key not in self._answers:
            self._answers[key] = self._meeting(self._layouts[layout], start, size)
        return self._answers[key]

    def _meeting(self, layout: Layout, start: Shape, size: Shape) -> list[tuple[int, int]]:
        if not start:
            return [(0, layout.ranks[0])]
        if not layout.ranks or 0 in size:
            return []
        starts, stops = np.array(layout.starts), np.array(layout.starts) + np.array(layout.sizes)
        low, high = np.maximum(starts, start), np.minimum(stops, np.add(start, size))
        return [(int(box), layout.ranks[box]) for box in np.flatnonzero((low < high).all(axis=1))]
