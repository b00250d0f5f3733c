"""The interface of packings: which sequences a source has, and how to read them. n sequences, T tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

IGNORE = -100
"""Label of a position without target."""

NOTHING = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
"""No place at all: rows and columns."""


class Ragged(NamedTuple):
    """An input with a different number of rows for each sequence, such as the patches of its images.

    Attributes:
        values: [sum(counts), ...], in the order of the sequences.
        counts: [n] int64, number of rows of each sequence.
    """

    values: np.ndarray
    counts: np.ndarray


class Sequences(NamedTuple):
    """Some sequences of a source.

    Attributes:
        tokens: [n, T + 1] unsigned or int64; token i + 1 of a row is the target of position i.
        ignored: rows and columns, two [k] int64, of the positions in [n, T] that have no target.
        extra: further inputs of the model, [n, ...]; `doc_ids` and `positions` are [n, T] int64; the document
            id of padding is -1.
        ragged: further inputs with a different number of rows for each sequence. The model does not get the
            counts; if it needs them, `extra` has them too.
    """

    tokens: np.ndarray
    ignored: tuple[np.ndarray, np.ndarray] = NOTHING
    extra: Mapping[str, np.ndarray] = {}
    ragged: Mapping[str, Ragged] = {}


class Packing:
    """Interface of the sequences of one source. It pickles small: workers open the files themselves.

    Every batch of every rank has the same inputs, whatever the sources of its sequences. So a packing
    declares its inputs beside tokens in `extra` and `ragged`, and each read returns exactly these.

    Attributes:
        max_tokens: T.
        digest: names the content; a run is continued only on data of the same digest.
        extra: by name, the value [...] for padding and for sequences of sources without this input, with the
            dtype and shape of one sequence.
        ragged: by name, an array [0, ...] of the dtype and shape of the rows.
        sequence_bytes: bytes of the `ragged` rows of a sequence, at most or on average; bounds the number of
            sequences that are read at once.
        host: names in `extra` and `ragged` that stay in host memory.
    """

    max_tokens: int
    digest: str = ""
    extra: Mapping[str, np.ndarray] = {}
    ragged: Mapping[str, np.ndarray] = {}
    sequence_bytes: int = 0
    host: frozenset[str] = frozenset()

    def __len__(self) -> int:
        """Return the number of sequences."""
        raise NotImplementedError

    def read(self, samples: np.ndarray) -> Sequences:
        """Return the sequences with these numbers, [n] int64.

        Raises:
            DataError: they are damaged.
        """
        raise NotImplementedError

    def token_counts(self, samples: np.ndarray) -> np.ndarray:
        """Return [n] int64, the number of the T tokens of each sequence before its padding."""
        return np.full(len(samples), self.max_tokens, dtype=np.int64)

    def require_files(self) -> None:
        """Check that the files still have their size: reading memory beyond their end would kill the process.

        Raises:
            DataError: one is shorter or longer than it was.
        """

    def describe(self) -> str:
        """Return the numbers of sequences and of cut documents, and the share of padding, in words."""
        return f"{len(self):,} sequences"


class TextPacking(Packing):
    """A packing of documents of text.

    Attributes:
        mask_documents: sequences have `doc_ids` and `positions`, both [n, T] int64.
    """

    mask_documents: bool

    @property
    def extra(self) -> Mapping[str, np.ndarray]:
        """See `Packing`; padding is one document whose positions are all 0."""
        if not self.mask_documents:
            return {}
        zeros = np.zeros(self.max_tokens, dtype=np.int64)
        return {"doc_ids": zeros, "positions": zeros}
