"""How items of samples that are no text, such as images, are read. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Size(NamedTuple):
    """The size of an item, from its header.

    Attributes:
        frames: number of frames; 1 for an image.
        height: in pixels.
        width: in pixels.
    """

    frames: int
    height: int
    width: int


class ItemReader(Protocol):
    """Reads items for a model. A source with items takes it from `Opening.items`. It pickles small.

    Attributes:
        digest: names everything that its results depend on; part of `Packing.digest`.
        host: names of arrays that stay in host memory.
        tokens_beside: number of visual tokens of a sequence beside its text; 0 if they stand in the text.
    """

    digest: str
    host: frozenset[str]
    tokens_beside: int

    @property
    def ragged(self) -> Mapping[str, np.ndarray]:
        """For each array of `read`, by name, an array [0, ...] of the dtype and shape of its rows."""
        ...

    def measure(self, raw: bytes) -> Size:
        """Return the size of an item, from the header of its file.

        Raises:
            ValueError: the header is damaged, or of an unknown format.
        """
        ...

    def layout(self, size: Size) -> list[str | int]:
        """Return what stands for an item of this size in the text: texts, and numbers of places in a row."""
        ...

    def visual_tokens(self, size: Size) -> int:
        """Return the number of tokens of an item of this size, wherever they stand."""
        ...

    def read(self, raw: bytes, size: Size) -> dict[str, np.ndarray]:
        """Return the arrays of an item by name, those of `Packing.ragged`: [rows, ...].

        Raises:
            ValueError: the item is damaged, or has another size.
        """
        ...

    def sequence(
        self,
        places: np.ndarray,
        sizes: Sequence[Size],
        doc_ids: np.ndarray,
        prompt: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Return further inputs of the model for a sequence, by the names of `Packing.extra`: [...].

        Args:
            places: [T] int64, 0 for text, else 1 + the number of the place in the sequence.
            sizes: sizes of the items of the sequence, in their order.
            doc_ids: [T] int64, the sample of each token, counted within the sequence; -1 for padding.
            prompt: [T] bool, the tokens before the first target of their sample; absent means none.
        """
        ...
