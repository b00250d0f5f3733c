"""Sequences made of planned pieces of documents. n sequences, T tokens, rows of C = T + 1."""

from __future__ import annotations

import numpy as np

from forge_data.packing import Sequences
from forge_data.row_index import RowIndex
from forge_data.tokens import TokenStore


class Packed:
    """Sequence i holds the pieces of row i, and padding behind them, which is no target.

    Every token but the first of a document is a target at most once; the first is one where the flags allow
    it and the row begins before it.

    Args:
        store: the tokens.
        index: which pieces each row holds.
        name: of the packing.
        max_tokens: T.
        mask_documents: keep attention and targets within documents; padding counts as one.
        mask_boundaries: keep targets within documents.
    """

    def __init__(
        self,
        store: TokenStore,
        index: RowIndex,
        name: str,
        max_tokens: int,
        mask_documents: bool = False,
        mask_boundaries: bool = False,
    ) -> None:
        self.store = store
        self.index = index
        self.name = name
        self.max_tokens = max_tokens
        self.mask_documents = mask_documents
        self.mask_boundaries = mask_documents or mask_boundaries

    def __len__(self) -> int:
        return len(self.index)

    def require_files(self) -> None:
        """See `Packing.require_files`."""
        self.store.require_files()
        self.index.require_files()

    def describe(self) -> str:
        """See `Packing.describe`."""
        return f"{self.name}: {self.index.statistics}"

    def read(self, samples: np.ndarray) -> Sequences:
        """See `Packing.read`."""
        starts, lengths, ends = self.index.pieces(samples)
        counts = np.diff(ends, prepend=0)
        row = np.repeat(np.arange(len(samples)), counts)
        stops = np.cumsum(lengths)
        row_stops = stops[ends - 1]
        used = np.diff(row_stops, prepend=0)
        column = stops - lengths - np.repeat(row_stops - used, counts)
        tokens = _rows(self.store.read_runs(starts, lengths), used, self.max_tokens + 1)
        ignored = self._ignored(starts, row, column, used)
        targets = self.store.are_targets(starts, lengths)
        if targets is not None:
            rows, columns = np.nonzero(_rows(targets == 0, used, self.max_tokens + 1)[:, 1:])
            ignored = np.concatenate([ignored[0], rows]), np.concatenate([ignored[1], columns])
        if not self.mask_documents:
            return Sequences(tokens, ignored)
        nth = np.arange(len(row)) - np.repeat(ends - counts, counts)
        positions = np.arange(row_stops[-1]) - np.repeat(stops - lengths, lengths)
        extra = {
            "doc_ids": _rows(np.repeat(nth, lengths), used, self.max_tokens + 1, counts)[:, :-1],
            "positions": _rows(positions, used, self.max_tokens + 1)[:, :-1],
        }
        return Sequences(tokens, ignored, extra)

    def _ignored(
        self, starts: np.ndarray, row: np.ndarray, column: np.ndarray, used: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns of the positions before padding and before pieces that are no target there."""
        no_target = column > 0
        if not self.mask_boundaries:
            # What continues a document has had its first token as a target where the piece before ends.
            ends = self.store.doc_ends
            before = np.searchsorted(ends, starts, side="right") - 1
            no_target &= np.where(before < 0, 0, ends[before]) != starts
        missing = self.max_tokens + 1 - used
        rows = np.repeat(np.arange(len(used)), missing)
        nth = np.arange(len(rows)) - np.repeat(np.cumsum(missing) - missing, missing)
        columns = used[rows] - 1 + nth
        return np.concatenate([row[no_target], rows]), np.concatenate([column[no_target] - 1, columns])


def _rows(values: np.ndarray, used: np.ndarray, length: int, fill: np.ndarray | None = None) -> np.ndarray:
    """[n, length]: the next `used` values in each row, and behind them zeros or the `fill` of the row."""
    if len(values) == len(used) * length:
        return values.reshape(len(used), length)
    rows = np.zeros((len(used), length), dtype=values.dtype)
    if fill is not None:
        rows[:] = fill[:, None]
    begin = 0
    for row, count in zip(rows, used.tolist(), strict=True):
        row[:count] = values[begin : begin + count]
        begin += count
    return rows
