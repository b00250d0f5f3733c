"""What a packing is: it says which sequences a source has, and reads them. n sequences, T tokens."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

IGNORE = -100
"""Label of a position without target."""

NOTHING = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
"""No place at all: rows and columns."""


class Sequences(NamedTuple):
    """Some sequences of a source.

    Attributes:
        tokens: [n, T + 1] unsigned or int64; token i + 1 of a row is the target of position i.
        ignored: rows and columns, two [k] int64, of the positions in [n, T] that have no target.
        extra: what else the model takes of each sequence, [n, ...]; `doc_ids` and `positions` are [n, T]
            int64.
    """

    tokens: np.ndarray
    ignored: tuple[np.ndarray, np.ndarray] = NOTHING
    extra: dict[str, np.ndarray] = {}


class Packing(Protocol):
    """The sequences of one source. It pickles small: workers open the files themselves.

    Attributes:
        max_tokens: T.
    """

    max_tokens: int

    def __len__(self) -> int:
        """How many sequences there are."""
        ...

    def read(self, samples: np.ndarray) -> Sequences:
        """Those with these numbers, [n] int64.

        Raises:
            DataError: they are damaged.
        """
        ...

    def require_files(self) -> None:
        """See that the files still have their size: touching what is gone would kill the process.

        Raises:
            DataError: one is shorter or longer than it was.
        """
        ...

    def describe(self) -> str:
        """How many sequences there are, how much of them is padding, how many documents are cut."""
        ...
