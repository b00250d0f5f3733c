"""From a configuration to the packing of a token store. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forge_data.packing.concat import Concat
from forge_data.packing.packed import Packed
from forge_data.packing.packing import Packing
from forge_data.packing.row_index import open_row_index
from forge_data.store.tokens import TokenStore

if TYPE_CHECKING:
    from forge_data.config import DataConfig


def pack(store: TokenStore, data: DataConfig, cache: Path) -> Packing:
    """Return the packing of a store; its plan is made first if need be.

    A store that is shorter than a sequence is one sequence with padding, whatever the packing.

    Raises:
        DataError: the store has no targets, or the plan cannot be kept.
    """
    store.require_targets()
    flags = data.mask_documents, data.mask_boundaries
    is_short = len(store) <= data.max_tokens
    if data.packing == "concat" and not is_short:
        return Concat(store, data.max_tokens, *flags)
    name = "crop" if data.packing == "concat" else data.packing  # one sequence, in order
    index = open_row_index(store, name, data.max_tokens, cache)
    return Packed(store, index, name, data.max_tokens, *flags)
