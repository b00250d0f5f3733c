"""Which packing a configuration asks for. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from forge_data.concat import Concat
from forge_data.config import DataConfig
from forge_data.packed import Packed
from forge_data.packing import Packing
from forge_data.row_index import VERSION, open_row_index
from forge_data.stores import cache_folder
from forge_data.tokens import TokenStore


def build_packings(config: DataConfig, stores: Mapping[int, TokenStore]) -> dict[int, Packing]:
    """The sequences of each source, by its place in the configuration; plans are made first when need be.

    Raises:
        DataError: a source is shorter than a sequence, or its plan cannot be kept.
    """
    return {number: _build(config, store) for number, store in stores.items()}


def _build(config: DataConfig, store: TokenStore) -> Packing:
    flags = config.mask_documents, config.mask_boundaries
    if config.packing == "concat":
        return Concat(store, config.max_tokens, *flags)
    index = open_row_index(store, config.packing, config.max_tokens, cache_folder(config))
    return Packed(store, index, config.packing, config.max_tokens, *flags)


def fingerprint_parts(config: DataConfig) -> list[str]:
    """What of the packing names the stream; nothing where nothing is asked for."""
    parts = [] if config.packing == "concat" else [f"packing {config.packing} {VERSION}"]
    return parts + ["mask_boundaries"] * config.mask_boundaries
