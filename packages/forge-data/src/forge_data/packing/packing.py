"""What a packing is: it says which sequences a source has, and reads them. n sequences, T tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

IGNORE = -100
"""Label of a position without target."""

NOTHING = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
"""No place at all: rows and columns."""


class Ragged(NamedTuple):
    """An input of which each sequence has a number of rows of its own, such as the patches of its images.

    Attributes:
        values: [sum(counts), ...], those of the first sequence first.
        counts: [n] int64, how many of them each sequence has.
    """

    values: np.ndarray
    counts: np.ndarray


class Sequences(NamedTuple):
    """Some sequences of a source.

    Attributes:
        tokens: [n, T + 1] unsigned or int64; token i + 1 of a row is the target of position i.
        ignored: rows and columns, two [k] int64, of the positions in [n, T] that have no target.
        extra: what else the model takes of each sequence, [n, ...]; `doc_ids` and `positions` are [n, T]
            int64; padding is of the document -1.
        ragged: what else the model takes, as many rows as each sequence has. The model is not given the
            counts; where it needs them they are an array of `extra` too.
    """

    tokens: np.ndarray
    ignored: tuple[np.ndarray, np.ndarray] = NOTHING
    extra: Mapping[str, np.ndarray] = {}
    ragged: Mapping[str, Ragged] = {}


class Packing:
    """Interface of the sequences of one source. It pickles small: workers open the files themselves.

    Every batch of every rank has the same inputs, whichever sources its sequences are from. So a packing
    declares in `extra` and `ragged` what it gives beside tokens, and each read gives exactly that.

    Attributes:
        max_tokens: T.
        digest: names the content; a run is continued only on data of the same digest.
        extra: by name, what padding and the sequences of sources without this input have of it: [...] of
            the dtype and shape of one sequence.
        ragged: by name, an array [0, ...] of the dtype and shape of the rows.
        sequence_bytes: of the rows of a sequence in `ragged`, at most or on average; bounds how many
            sequences are read at once.
        host: names in `extra` and `ragged` that stay in the memory of the host.
    """

    max_tokens: int
    digest: str = ""
    extra: Mapping[str, np.ndarray] = {}
    ragged: Mapping[str, np.ndarray] = {}
    sequence_bytes: int = 0
    host: frozenset[str] = frozenset()

    def __len__(self) -> int:
        """How many sequences there are."""
        raise NotImplementedError

    def read(self, samples: np.ndarray) -> Sequences:
        """The sequences with these numbers, [n] int64.

        Raises:
            DataError: they are damaged.
        """
        raise NotImplementedError

    def token_counts(self, samples: np.ndarray) -> np.ndarray:
        """How many of the T tokens of those sequences are no padding, which is behind them: [n] int64."""
        return np.full(len(samples), self.max_tokens, dtype=np.int64)

    def require_files(self) -> None:
        """See that the files still have their size: touching what is gone would kill the process.

        Raises:
            DataError: one is shorter or longer than it was.
        """

    def describe(self) -> str:
        """How many sequences there are, how much of them is padding, how many documents are cut."""
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
