"""Sequences made of planned pieces of documents. n sequences, T tokens, rows of C = T + 1."""

from __future__ import annotations

import numpy as np

from forge_data.packing.packing import Sequences, TextPacking
from forge_data.packing.row_index import RowIndex
from forge_data.store.tokens import TokenStore


class Packed(TextPacking):
    """Sequence i holds the pieces of row i, and after them padding, which is no target.

    Every token but the first of a document is a target at most once; the first is one if the flags allow it
    and the row begins before it.

    Args:
        store: the tokens.
        index: the pieces of each row.
        name: name of the packing.
        max_tokens: T.
        mask_documents: keep attention and targets within documents; padding is a document with the id -1.
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
        self.digest = store.manifest.digest
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
        used = np.diff(stops[ends - 1], prepend=0)
        column = stops - lengths - np.repeat(stops[ends - 1] - used, counts)
        shape = len(samples), self.max_tokens + 1
        places = row * shape[1] + column
        tokens = np.zeros(shape, dtype=np.int64)
        self.store.copy_runs(starts, lengths, tokens.reshape(-1), places)
        ignored = self._ignored(starts, row, column, used)
        are_targets = np.ones(shape, dtype=np.uint8)
        if self.store.copy_targets(starts, lengths, are_targets.reshape(-1), places):
            rows, columns = np.nonzero(are_targets[:, 1:] == 0)
            ignored = np.concatenate([ignored[0], rows]), np.concatenate([ignored[1], columns])
        if not self.mask_documents:
            return Sequences(tokens, ignored)
        return Sequences(tokens, ignored, self._documents(lengths, counts, places))

    def token_counts(self, samples: np.ndarray) -> np.ndarray:
        """See `Packing.token_counts`."""
        _, lengths, ends = self.index.pieces(samples)
        return np.minimum(np.diff(np.cumsum(lengths)[ends - 1], prepend=0), self.max_tokens)

    def _documents(
        self, lengths: np.ndarray, counts: np.ndarray, places: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return the piece of each token in its row, and the position within it; padding has -1."""
        shape = len(counts), self.max_tokens + 1
        doc_ids, positions = np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        nth = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
        flat, flat_positions, rising = doc_ids.reshape(-1), positions.reshape(-1), np.arange(shape[1])
        pieces = zip(
            places.tolist(), (places + lengths).tolist(), nth.tolist(), lengths.tolist(), strict=True
        )
        for start, stop, number, length in pieces:
            flat[start:stop] = number
            flat_positions[start:stop] = rising[:length]
        return {"doc_ids": doc_ids[:, :-1], "positions": positions[:, :-1]}

    def _ignored(
        self, starts: np.ndarray, row: np.ndarray, column: np.ndarray, used: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and columns of positions before padding and before pieces that are no target there."""
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
