"""Verifies a store: reads everything and compares it with the manifest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from forge_data.error import DataError
from forge_data.store.tokens import CHUNK, TokenStore
from forge_data.tokenizer.tokenizer import Tokenizer, is_named


def problems(
    folders: Sequence[Path], tokenizer: Tokenizer | None = None
) -> Iterator[tuple[Path, str | None]]:
    """Yield each store and its problem; None if it has none.

    Args:
        folders: the stores.
        tokenizer: the expected tokenizer; None does not check it.
    """
    seen: dict[str, Path] = {}
    for folder in folders:
        try:
            store = TokenStore(folder)
            store.verify()
            if tokenizer is not None:
                _require_tokenizer(store, tokenizer)
            first = seen.setdefault(store.manifest.digest, folder)
            if first != folder:
                raise DataError(f"{folder} holds the same documents as {first}; leave one of them out")
        except DataError as error:
            yield folder, str(error)
        else:
            yield folder, None


def _require_tokenizer(store: TokenStore, tokenizer: Tokenizer) -> None:
    manifest = store.manifest
    if not is_named(tokenizer, manifest.tokenizer) or manifest.vocab_size != tokenizer.vocab_size:
        raise DataError(
            f"{store.folder} was made with tokenizer {manifest.tokenizer} of {manifest.vocab_size} ids; "
            f"given {tokenizer.digest} of {tokenizer.vocab_size}: name its own"
        )
    for start in range(0, len(store.doc_ends), CHUNK):
        last = store.read(store.doc_ends[start : start + CHUNK] - 1, 1)[:, 0]
        without = np.flatnonzero(last != tokenizer.eos_id)
        if len(without):
            raise DataError(
                f"document {start + int(without[0])} of {store.folder} does not end with the end token "
                f"{tokenizer.eos_id}, nor do {len(without) - 1} of those that follow; make the store anew"
            )
