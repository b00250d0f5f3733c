"""How documents are laid into rows of C = T + 1 tokens: as arrays, a pure function of the documents.

A document longer than a row is cut every T tokens: each further piece begins with the last token of the piece
before, which is once a target and once an input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Layout(NamedTuple):
    """Pieces of documents in the order of their rows.

    Attributes:
        starts: [pieces] int64, the first token of each.
        lengths: [pieces] int64, from 1 to C.
        ends: [rows] int64, number of pieces in this row and all rows before it.
    """

    starts: np.ndarray
    lengths: np.ndarray
    ends: np.ndarray


def cut(starts: np.ndarray, lengths: np.ndarray, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents into the fewest pieces of at most T + 1 tokens; returns starts and lengths, in order."""
    counts = np.maximum(1, -(-(lengths - 1) // max_tokens))
    which = np.repeat(np.arange(len(starts)), counts)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = starts[which] + nth * max_tokens
    return begins, np.minimum((starts + lengths)[which] - begins, max_tokens + 1)


def pad(starts: np.ndarray, lengths: np.ndarray, max_tokens: int) -> Layout:
    """Put each piece into its own row."""
    begins, sizes = cut(starts, lengths, max_tokens)
    return Layout(begins, sizes, np.arange(1, len(begins) + 1))


def bestfit(starts: np.ndarray, lengths: np.ndarray, max_tokens: int) -> Layout:
    """Put each piece, the longest first, into the row where it leaves the least room.

    Source: best-fit-decreasing packing of Ding et al. 2024, arXiv:2404.10830.
    """
    begins, sizes = cut(starts, lengths, max_tokens)
    row = best_fit_rows(sizes, max_tokens + 1)
    order = np.argsort(row, kind="stable")
    return Layout(begins[order], sizes[order], np.cumsum(np.bincount(row)))


def crop(starts: np.ndarray, lengths: np.ndarray, max_tokens: int) -> Layout:
    """Begin each row with a document, fill it with the following ones, and cut the last."""
    ends = starts + lengths
    following = np.searchsorted(ends, starts + max_tokens + 1, side="left") + 1
    jumps, firsts, document = following.tolist(), list[int](), 0
    while document < len(jumps):
        firsts.append(document)
        document = jumps[document]
    counts = np.diff(firsts, append=len(starts))
    limit = np.repeat(starts[firsts] + max_tokens + 1, counts)
    return Layout(starts, np.minimum(ends, limit) - starts, np.cumsum(counts))


layouts: dict[str, Callable[[np.ndarray, np.ndarray, int], Layout]] = {
    "bestfit": bestfit,
    "pad": pad,
    "crop": crop,
}
"""By the name of `data.packing`; each takes starts and lengths of documents, both [n] int64, and T."""


def best_fit_rows(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return [n] int64, the row of each piece. Pieces of one size are put into rows in one operation.

    Args:
        sizes: [n] int64, from 1 to `capacity`.
        capacity: tokens of a row.
    """
    order = np.argsort(-sizes, kind="stable")
    different, counts = np.unique(sizes, return_counts=True)
    rows, room, opened, done = np.empty(len(sizes), dtype=np.int64), _Room(), 0, 0
    for size, count in zip(different[::-1].tolist(), counts[::-1].tolist(), strict=True):
        pieces, done = order[done : done + count], done + count
        while len(pieces):
            free = room.smallest(size)
            # A row that fits best still does after it took one: it is filled before another is.
            each = (free or capacity) // size
            wanted = -(-len(pieces) // each)
            if free is None:
                free, into, opened = capacity, np.arange(opened, opened + wanted), opened + wanted
            else:
                into = room.take(free, wanted)
            here, pieces = pieces[: len(into) * each], pieces[len(into) * each :]
            rows[here] = np.repeat(into, each)[: len(here)]
            room.put(free - each * size, into[:-1])
            room.put(free - (len(here) - (len(into) - 1) * each) * size, into[-1:])
    return rows


class _Room:
    """The rows by the number of tokens they have room for."""

    def __init__(self) -> None:
        self._rows: dict[int, list[np.ndarray]] = {}
        self._which = 0  # bit i: some row has room for i tokens

    def put(self, free: int, rows: np.ndarray) -> None:
        if free and len(rows):
            self._rows.setdefault(free, []).append(rows)
            self._which |= 1 << free

    def smallest(self, size: int) -> int | None:
        """Return the least room of a row that is at least `size`."""
        above = self._which >> size
        return size + (above & -above).bit_length() - 1 if above else None

    def take(self, free: int, count: int) -> np.ndarray:
        """Remove and return at most `count` rows with this room, the last added first."""
        parts, stack = list[np.ndarray](), self._rows[free]
        while stack and count:
            rows = stack.pop()
            if len(rows) > count:
                stack.append(rows[:-count])
                rows = rows[-count:]
            parts.append(rows)
            count -= len(rows)
        if not stack:
            self._which &= ~(1 << free)
        return np.concatenate(parts)
