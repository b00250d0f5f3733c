"""From a configuration to packings. Imports no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_data.config import DataConfig
from forge_data.error import DataError, NothingHeldOutError
from forge_data.order.order import key
from forge_data.packing.packing import Packing
from forge_data.packing.row_index import VERSION
from forge_data.packing.stream import Place, Stream
from forge_data.sources.config import Opening, SourceConfig, Split
from forge_data.sources.items import ItemReader
from forge_data.store.tokenize import Making, Progress


def cache_folder(config: DataConfig) -> Path:
    """Return the folder of tokenized text."""
    named = config.cache_dir or os.environ.get("FORGE_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "forge"


def build_packings(
    config: DataConfig,
    split: Split,
    on_progress: Progress | None = None,
    items: ItemReader | None = None,
    contents: dict[Path, str] | None = None,
    lacks: list[str] | None = None,
) -> dict[int, Packing]:
    """Return the packing of each source with samples for the split and no stream, by its place in `config`.

    Args:
        config: the section `[data]`.
        split: the split of the samples.
        on_progress: receives the progress while text is tokenized.
        items: the reader of items such as images.
        contents: see `Making`.
        lacks: receives why sources have nothing held out: too few documents.

    Raises:
        DataError: data are missing or damaged or cannot be cut as asked, or no source has validation data.
        NothingHeldOutError: no source has any, because they have too few documents.
    """
    opening, found = _opening(config, split, on_progress, items, contents), dict[int, Packing]()
    lacks = [] if lacks is None else lacks
    for number in _taken(config, split):
        try:
            with named_source(config, number):
                found[number] = config.sources[number].packing(opening)
                _require_packing(config, found[number])
        except NothingHeldOutError as error:
            lacks.append(str(error))
    if lacks and not found:
        raise NothingHeldOutError("; ".join(lacks))
    return found


def held_out_digests(
    config: DataConfig,
    on_progress: Progress | None = None,
    items: ItemReader | None = None,
    contents: dict[Path, str] | None = None,
    lacks: list[str] | None = None,
) -> dict[int, str]:
    """Return the digest of the held-out text of each source, by its place in `config`.

    This cuts no tokens. `lacks` receives why sources have nothing held out: too few documents.

    Raises:
        DataError: data are missing or damaged.
    """
    if not config.has_validation():
        return {}
    lacks = [] if lacks is None else lacks
    opening, found = _opening(config, "validation", on_progress, items, contents), dict[int, str]()
    for number in _taken(config, "validation"):
        source = config.sources[number]
        try:
            with named_source(config, number):
                found[number] = _digest(config, source, opening)
        except NothingHeldOutError as error:
            lacks.append(str(error))
    return found


def _digest(config: DataConfig, source: SourceConfig, opening: Opening) -> str:
    if source.has_tokens_only():
        store = source.open(opening.split, opening.tokenizer, opening.cache, opening.making)
        return store.manifest.digest
    packing = source.packing(opening)
    _require_packing(config, packing)
    return packing.digest


def _opening(
    config: DataConfig,
    split: Split,
    on_progress: Progress | None,
    items: ItemReader | None,
    contents: dict[Path, str] | None,
) -> Opening:
    making = Making(config.tokenize_workers, on_progress, contents)
    return Opening(split, config.tokenizer, cache_folder(config), making, config, items)


def _taken(config: DataConfig, split: Split) -> list[int]:
    """Return the places of the sources with samples for the split that are not streamed."""
    train = split == "train"
    has = [not s.is_streamed() if train else s.has_validation() for s in config.sources]
    if not any(has) and not train:
        raise DataError(
            "no source has text for validation; give one `held_out` above 0, or `validation` text of its own"
        )
    return [number for number, takes in enumerate(has) if takes]


def _require_packing(config: DataConfig, packing: Packing) -> None:
    """Refuse a packing, perhaps a plug, that lacks a required attribute."""
    kind = type(packing).__name__
    if packing.max_tokens != config.max_tokens:
        raise DataError(
            f"its {kind} has sequences of {packing.max_tokens} tokens; expected those of data.max_tokens, "
            f"{config.max_tokens}"
        )
    if packing.ragged and packing.sequence_bytes <= 0:
        raise DataError(
            f"its {kind} gives {', '.join(packing.ragged)}, of which each sequence has rows of its own, and "
            "no sequence_bytes, which bounds what is read at once; set it to the bytes of a sequence"
        )
    if not packing.digest:
        raise DataError(
            f"its {kind} has no digest; set `digest` to a text that names its content, so that a run is not "
            "continued on other data"
        )
    if config.mask_documents and not {"doc_ids", "positions"} <= packing.extra.keys():
        raise DataError(
            f"its {kind} gives {', '.join(packing.extra) or 'nothing'} beside tokens; data.mask_documents = "
            "true expects doc_ids and positions: declare and give both, or set it to false"
        )


@contextlib.contextmanager
def named_source(config: DataConfig, number: int) -> Iterator[None]:
    """A context in which errors about a source name it."""
    try:
        yield
    except DataError as error:
        raise type(error)(f"source {config.source_names()[number]}: {error}") from None


def build_streams(
    config: DataConfig,
    global_batch: int,
    state: Mapping[str, Any],
    started: bool = False,
    items: ItemReader | None = None,
) -> dict[int, Stream]:
    """Build the streamed sources, by their place in the configuration.

    Args:
        config: the section `[data]`.
        global_batch: sequences a step.
        state: the results of `Loader.state` of all ranks; other entries are ignored.
        started: the run has read from them, so that `state` must hold their places.
        items: the reader of items such as images.

    Raises:
        DataError: a source cannot be dealt to lanes, or `state` misses some of them.
    """
    found: dict[int, Stream] = {}
    for number, source in enumerate(config.sources):
        if not source.is_streamed():
            continue
        with named_source(config, number):
            streamed = source.open_stream(cache_folder(config), state.get(pin_key(number)))
            lanes = streamed.num_lanes(global_batch)
        kept = {lane: state.get(state_key(number, lane)) for lane in range(lanes)}
        if started and None in kept.values():
            raise DataError(
                f"the checkpoint does not say how far the stream {config.source_names()[number]} was read; "
                "start a new run"
            )
        places = {lane: Place(*place) for lane, place in kept.items() if place is not None}
        seed = key(config.seed, "stream", number)
        with named_source(config, number):
            found[number] = streamed.stream(config, items, lanes, seed, places)
            _require_packing(config, found[number])
    return found


def pin_streams(config: DataConfig, state: Mapping[str, Any]) -> dict[str, str]:
    """Return the version of each stream that has several, such as a commit of the hub.

    It is taken from `state`, if it is there. All ranks of a new run need the same version: one rank asks the
    hub, see `SourceConfig.pin_stream`.
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


def train_packings(
    config: DataConfig, global_batch: int, items: ItemReader | None = None
) -> dict[int, Packing]:
    """Return the packings of all sources in their order, streams from their start.

    Args:
        config: the section `[data]`.
        global_batch: sequences a step.
        items: the reader of items such as images; None if there are no items.

    Raises:
        DataError: data are missing, or cannot be cut as asked.
    """
    packings = build_packings(config, "train", items=items)
    packings |= build_streams(config, global_batch, {}, items=items)
    return dict(sorted(packings.items()))


def fingerprint_parts(config: DataConfig) -> list[str]:
    """Return the parts of a fingerprint that depend on the packing; empty by default."""
    parts = [] if config.packing == "concat" else [f"packing {config.packing} {VERSION}"]
    return parts + ["mask_boundaries"] * config.mask_boundaries
