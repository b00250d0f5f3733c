"""A token store as sequences of T tokens with their targets. T tokens, B sequences."""

from __future__ import annotations

import numpy as np

from forge_data.error import DataError
from forge_data.tokens import TokenStore

IGNORE = -100
"""Label of a position without target."""


class Windows:
    """Sequence i reads tokens i*T to i*T + T, the last being a target only, so every token but the first is a target.

    The last sequence starts earlier where the store would end before it does: it overlaps, nothing is padded or lost.

    Raises:
        DataError: the store is shorter than one sequence.
    """

    def __init__(self, store: TokenStore, max_tokens: int) -> None:
        if len(store) < max_tokens + 1:
            raise DataError(f"{store.folder} has {len(store)} tokens; a sequence needs {max_tokens + 1}")
        self.store = store
        self.max_tokens = max_tokens

    def __len__(self) -> int:
        return -(-(len(self.store) - 1) // self.max_tokens)

    def start(self, index: int) -> int:
        """The first token of a sequence."""
        return min(index * self.max_tokens, len(self.store) - self.max_tokens - 1)

    def read(self, index: int, out: np.ndarray) -> None:
        """Write the T + 1 tokens of a sequence into `out`, [T + 1] int64."""
        start = self.start(index)
        out[:] = self.store.tokens[start : start + self.max_tokens + 1]

    def documents(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Which document each position of a sequence is in, and how far into it.

        Returns:
            Two [T + 1] int64: documents counted within the sequence, and positions from the later of the start of
            the document and of the sequence.
        """
        start, length = self.start(index), self.max_tokens + 1
        ends = self.store.doc_ends
        first, last = np.searchsorted(ends, [start, start + length - 1], side="right")
        opens = np.zeros(length, dtype=np.int64)
        inside = np.asarray(ends[first:last]).astype(np.int64) - start
        opens[inside] = 1
        begins = np.concatenate([[0], inside])
        doc_ids = np.cumsum(opens)
        return doc_ids, np.arange(length) - begins[doc_ids]
