"""A range of documents of a token store as a store of its own. Imports no torch."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from forge_data.error import DataError
from forge_data.store.tokens import CHUNK, TokenStore


class StorePart(TokenStore):
    """A range of documents. Tokens and documents are counted from its own start.

    Args:
        whole: the store; nothing of it is copied.
        first: the first document.
        end: the document after the last.
    """

    def __init__(self, store: TokenStore, first: int, end: int) -> None:
        super().__init__(store.folder)
        self._documents = slice(first, end)
        ends = store.doc_ends
        self._start = int(ends[first - 1]) if first else 0
        named, manifest = f"{first}-{end}", self.manifest
        self.manifest = replace(
            manifest,
            num_tokens=int(ends[end - 1]) - self._start,
            num_docs=end - first,
            tokens=replace(manifest.tokens, digest=f"{manifest.tokens.digest} {named}"),
            docs=replace(manifest.docs, digest=f"{manifest.docs.digest} {named}"),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return StorePart, (TokenStore(self.folder), self._documents.start, self._documents.stop)

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """See `TokenStore.read`."""
        return super().read(starts + self._start, length)

    def copy_runs(self, starts: np.ndarray, lengths: np.ndarray, out: np.ndarray, places: np.ndarray) -> None:
        """See `TokenStore.copy_runs`."""
        super().copy_runs(starts + self._start, lengths, out, places)

    def no_targets(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray] | None:
        """See `TokenStore.no_targets`."""
        return super().no_targets(starts + self._start, length)

    def copy_targets(
        self, starts: np.ndarray, lengths: np.ndarray, out: np.ndarray, places: np.ndarray
    ) -> bool:
        """See `TokenStore.copy_targets`."""
        return super().copy_targets(starts + self._start, lengths, out, places)

    def require_targets(self) -> None:
        """See `TokenStore.require_targets`."""
        if self._targets is None:
            return
        values = self._targets.values[self._start : self._start + len(self)]
        if not any(values[start : start + CHUNK].any() for start in range(0, len(values), CHUNK)):
            raise DataError(
                f"no token of the documents {self._documents.start} to {self._documents.stop - 1} of "
                f"{self.folder} is a target; hold out another part"
            )

    @cached_property
    def doc_ends(self) -> np.ndarray:
        """See `TokenStore.doc_ends`."""
        self._docs.verify()
        return self._docs.values[self._documents] - self._start


def held_out_part(store: TokenStore, held_out: float, split: Literal["train", "validation"]) -> StorePart:
    """Return the last documents, with at least this fraction of the tokens, or all documents before them.

    Raises:
        DataError: the store has one document only, so that one of them would be empty.
    """
    ends = store.doc_ends
    if len(ends) < 2:
        raise DataError(
            f"held_out = {held_out} of {store.folder}, which has {len(ends)} document; name a store as "
            "validation"
        )
    cut = int(np.searchsorted(ends, len(store) * (1 - held_out), side="right"))
    cut = min(max(cut, 1), len(ends) - 1)
    return StorePart(store, 0, cut) if split == "train" else StorePart(store, cut, len(ends))
