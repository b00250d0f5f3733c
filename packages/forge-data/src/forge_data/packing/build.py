"""Which packing a configuration asks for. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.order.order import key
from forge_data.packing.concat import Concat
from forge_data.packing.packed import Packed
from forge_data.packing.packing import Packing
from forge_data.packing.row_index import VERSION, open_row_index
from forge_data.packing.stream import Place, Stream
from forge_data.store.stores import cache_folder, named_source, open_stores
from forge_data.store.tokens import TokenStore


def build_packings(config: DataConfig, stores: Mapping[int, TokenStore]) -> dict[int, Packing]:
    """The sequences of each source, by its place in the configuration; plans are made first when need be.

    Raises:
        DataError: a source is shorter than a sequence, or its plan cannot be kept.
    """
    found: dict[int, Packing] = {}
    for number, store in stores.items():
        with named_source(config, number):
            found[number] = _build(config, store)
    return found


def build_streams(
    config: DataConfig, global_batch: int, state: Mapping[str, Any], started: bool = False
) -> dict[int, Stream]:
    """The sources that are streamed, by their place in the configuration.

    Args:
        config: the section `[data]`.
        global_batch: sequences a step.
        state: from `Loader.state`, of all ranks; what else it holds is passed over.
        started: the run has read from them, so that `state` must say where it is.

    Raises:
        DataError: a source cannot be dealt to lanes, or `state` misses some of them.
    """
    found: dict[int, Stream] = {}
    for number, source in enumerate(config.sources):
        if not source.is_streamed():
            continue
        with named_source(config, number):
            text = source.open_stream(cache_folder(config), state.get(pin_key(number)))
            lanes = text.num_lanes(global_batch)
        kept = {lane: state.get(state_key(number, lane)) for lane in range(lanes)}
        if started and None in kept.values():
            raise DataError(
                f"the checkpoint does not say how far the stream {config.source_names()[number]} was read; "
                "start a new run"
            )
        places = {lane: Place(*place) for lane, place in kept.items() if place is not None}
        flags = config.mask_documents, config.mask_boundaries
        seed = key(config.seed, "stream", number)
        found[number] = Stream(text, config.tokenizer, lanes, seed, config.max_tokens, *flags, places)
    return found


def pin_streams(config: DataConfig, state: Mapping[str, Any]) -> dict[str, str]:
    """The version of each stream that has several, such as a commit of the hub.

    It is that of `state`, if there is one there. Each rank of a new run must be told the same: one asks,
    see `SourceConfig.pin_stream`.
    """
    found: dict[str, str] = {}
    for number, source in enumerate(config.sources):
        pin = state.get(pin_key(number)) or (source.pin_stream() if source.is_streamed() else None)
        if pin is not None:
            found[pin_key(number)] = pin
    return found


def pin_key(source: int) -> str:
    """The name of the version of a stream in a checkpoint."""
    return f"data.{source}.version"


def state_key(source: int, lane: int) -> str:
    """The name of the place of a lane in a checkpoint."""
    return f"data.{source}.{lane}"


def train_packings(config: DataConfig, global_batch: int) -> dict[int, Packing]:
    """The sequences of all sources in their order, streams from their start.

    Raises:
        DataError: data are missing, or cannot be cut as asked.
    """
    packings: dict[int, Packing] = dict(build_packings(config, open_stores(config, "train")))
    return dict(sorted((packings | build_streams(config, global_batch, {})).items()))


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
