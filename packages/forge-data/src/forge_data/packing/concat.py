"""Documents laid end to end and cut into sequences of T tokens. n sequences, T tokens."""

from __future__ import annotations

import numpy as np

from forge_data.error import DataError
from forge_data.packing.packing import NOTHING, Sequences, TextPacking
from forge_data.store.tokens import TokenStore


class Concat(TextPacking):
    """Sequence i reads tokens i*T to i*T + T, the last being a target only.

    The last sequence starts earlier if the store would end before it does; its targets that the sequence
    before has too are not counted again. So nothing is padded, and every token but the first of the store is
    a target exactly once.

    Args:
        store: the tokens.
        max_tokens: T.
        mask_documents: keep attention and targets within documents.
        mask_boundaries: keep targets within documents.

    Raises:
        DataError: the store is shorter than one sequence.
    """

    def __init__(
        self, store: TokenStore, max_tokens: int, mask_documents: bool = False, mask_boundaries: bool = False
    ) -> None:
        if len(store) < max_tokens + 1:
            raise DataError(
                f"{store.folder} has {len(store)} tokens; a sequence needs {max_tokens + 1}; "
                "shorten data.max_tokens or add text"
            )
        self.store = store
        self.digest = store.manifest.digest
        self.max_tokens = max_tokens
        self.mask_documents = mask_documents
        self.mask_boundaries = mask_documents or mask_boundaries

    def __len__(self) -> int:
        return -(-(len(self.store) - 1) // self.max_tokens)

    def require_files(self) -> None:
        """See `Packing.require_files`."""
        self.store.require_files()

    def starts(self, samples: np.ndarray) -> np.ndarray:
        """[n] int64: the first token of each sequence."""
        return np.minimum(samples * self.max_tokens, len(self.store) - self.max_tokens - 1)

    def read(self, samples: np.ndarray) -> Sequences:
        """See `Packing.read`."""
        starts = self.starts(samples)
        tokens = self.store.read(starts, self.max_tokens + 1)
        ignored = self._seen_before(samples * self.max_tokens - starts)
        untrained = self.store.no_targets(starts + 1, self.max_tokens)
        if untrained is not None:
            ignored = _joined(ignored, untrained)
        if not self.mask_boundaries:
            return Sequences(tokens, ignored)
        ends, extra = documents(self.store.doc_ends, starts, self.max_tokens)
        return Sequences(tokens, _joined(ignored, ends), extra if self.mask_documents else {})

    def describe(self) -> str:
        """See `Packing.describe`."""
        ends = self.store.doc_ends
        first = np.concatenate([[0], ends[:-1]])
        in_the_last = first >= len(self.store) - self.max_tokens - 1
        cut = int(np.sum((first // self.max_tokens < (ends - 2) // self.max_tokens) & ~in_the_last))
        return (
            f"concat: {len(self):,} sequences, no padding, {cut:,} of {len(ends):,} documents cut "
            f"({cut / len(ends):.1%})"
        )

    def _seen_before(self, overlap: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and columns of the targets that the sequence before has too."""
        if not overlap.any():
            return NOTHING
        rows = np.repeat(np.arange(len(overlap)), overlap)
        return rows, np.concatenate([np.arange(count) for count in overlap.tolist()])


Places = tuple[np.ndarray, np.ndarray]


def _joined(some: Places, others: Places) -> Places:
    rows, columns = (np.concatenate(both) for both in zip(some, others, strict=True))
    return rows, columns


def documents(
    doc_ends: np.ndarray, starts: np.ndarray, max_tokens: int
) -> tuple[tuple[np.ndarray, np.ndarray], dict[str, np.ndarray]]:
    """Return the document of each position, and the position within it.

    Args:
        doc_ends: [documents] int64, rising.
        starts: [n] int64, the first token of each sequence of T + 1 tokens.
        max_tokens: T.

    Returns:
        Rows and columns, two [k] int64, of the positions whose target lies in the next document; `doc_ids`,
        documents counted within the sequence, and `positions`, from the later of the start of the document
        and of the sequence, both [n, T] int64.
    """
    length = max_tokens + 1
    first = np.searchsorted(doc_ends, starts, side="right")
    counts = np.searchsorted(doc_ends, starts + max_tokens, side="right") - first
    # Each row is cut into pieces: one from its start, one from each end of a document within it.
    rows = np.repeat(np.arange(len(starts)), counts + 1)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(counts + 1) - counts - 1, counts + 1)
    inside = np.flatnonzero(nth)
    begins = rows * length
    columns = doc_ends[first[rows[inside]] + nth[inside] - 1] - starts[rows[inside]]
    begins[inside] += columns
    lengths = np.diff(begins, append=len(starts) * length)
    shape = len(starts), length
    doc_ids = np.repeat(nth, lengths).reshape(shape)
    positions = (np.arange(len(starts) * length) - np.repeat(begins, lengths)).reshape(shape)
    return (rows[inside], columns - 1), {"doc_ids": doc_ids[:, :-1], "positions": positions[:, :-1]}
