"""A token store as sequences of T tokens with their targets. n sequences, T tokens."""

from __future__ import annotations

import numpy as np

from forge_data.error import DataError
from forge_data.tokens import TokenStore

IGNORE = -100
"""Label of a position without target."""


class Windows:
    """Sequence i reads tokens i*T to i*T + T, the last being a target only.

    The last sequence starts earlier where the store would end before it does; the targets it shares with the
    one before are not counted again (`overlap`). So nothing is padded, and every token but the first of the
    store is a target exactly once.

    Raises:
        DataError: the store is shorter than one sequence.
    """

    def __init__(self, store: TokenStore, max_tokens: int) -> None:
        if len(store) < max_tokens + 1:
            raise DataError(
                f"{store.folder} has {len(store)} tokens; a sequence needs {max_tokens + 1}; "
                "shorten data.max_tokens or add text"
            )
        self.store = store
        self.max_tokens = max_tokens

    def __reduce__(self) -> tuple[type[Windows], tuple[TokenStore, int]]:
        return Windows, (self.store, self.max_tokens)

    def __len__(self) -> int:
        return -(-(len(self.store) - 1) // self.max_tokens)

    def starts(self, samples: np.ndarray) -> np.ndarray:
        """[n] int64: the first token of each sequence."""
        return np.minimum(samples * self.max_tokens, len(self.store) - self.max_tokens - 1)

    def overlap(self, samples: np.ndarray) -> np.ndarray:
        """[n] int64: how many leading targets of each sequence the sequence before has had."""
        return samples * self.max_tokens - self.starts(samples)

    def read(self, samples: np.ndarray) -> np.ndarray:
        """[n, T + 1] int64: the tokens of each sequence.

        Raises:
            DataError: they are damaged.
        """
        return self.store.read(self.starts(samples), self.max_tokens + 1).astype(np.int64)

    def documents(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which document each position is in, and how far into it.

        Returns:
            Two [n, T + 1] int64: documents counted within the sequence, and positions from the later of the
            start of the document and of the sequence.
        """
        starts, length = self.starts(samples), self.max_tokens + 1
        ends = self.store.doc_ends
        first = np.searchsorted(ends, starts, side="right")
        counts = np.searchsorted(ends, starts + length - 1, side="right") - first
        rows = np.repeat(np.arange(len(starts)), counts)
        nth = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        columns = ends[first[rows] + nth] - starts[rows]
        doc_ids = np.zeros((len(starts), length), dtype=np.int64)
        doc_ids[rows, columns] = 1
        begins = np.zeros_like(doc_ids)
        begins[rows, columns] = columns
        np.cumsum(doc_ids, axis=1, out=doc_ids)
        np.maximum.accumulate(begins, axis=1, out=begins)
        return doc_ids, np.arange(length) - begins
