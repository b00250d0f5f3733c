"""Which token stores a configuration names. Imports no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.sources.config import Split
from forge_data.store.tokenize import Making, Progress
from forge_data.store.tokens import TokenStore


def cache_folder(config: DataConfig) -> Path:
    """Where tokenized text is kept."""
    named = config.cache_dir or os.environ.get("FORGE_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "forge"


def open_stores(
    config: DataConfig, split: Split, on_progress: Progress | None = None
) -> dict[int, TokenStore]:
    """The tokens of each source that has a store for the split, by its place in the configuration.

    Args:
        config: the section `[data]`.
        split: which text.
        on_progress: told how far it is while text is tokenized.

    Raises:
        DataError: data are missing or damaged, or no source has validation data.
    """
    cache = cache_folder(config)
    train = split == "train"
    has_store = [not s.is_streamed() if train else s.has_validation() for s in config.sources]
    taken = [number for number, has in enumerate(has_store) if has]
    if not taken and not train:
        raise DataError(
            "no source has text for validation; give one `held_out` above 0, or `validation` text of its own"
        )
    making = Making(config.tokenize_workers, on_progress)
    stores: dict[int, TokenStore] = {}
    for number in taken:
        with named_source(config, number):
            stores[number] = config.sources[number].open(split, config.tokenizer, cache, making)
    return stores


@contextlib.contextmanager
def named_source(config: DataConfig, number: int) -> Iterator[None]:
    """Errors about a source say which of them it is."""
    try:
        yield
    except DataError as error:
        raise DataError(f"source {config.source_names()[number]}: {error}") from None
