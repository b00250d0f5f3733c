"""From a configuration to the batches of a rank, as tensors. B sequences, T tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from msgspec import structs

from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.loading.batches import Batches, Group, StreamedBatches, TrainBatches, ValidationBatches
from forge_data.loading.micro_batch import MicroBatch as MicroBatch
from forge_data.loading.micro_batch import micro_batches
from forge_data.loading.workers import Workers
from forge_data.order.mixing import Run, build_order, fingerprint_parts, last_step, num_joined, plan_lines
from forge_data.order.order import VERSION, Order
from forge_data.packing.build import build_packings, build_streams, held_out_digests, pin_key
from forge_data.packing.build import fingerprint_parts as packing_parts
from forge_data.packing.packing import Packing
from forge_data.packing.stream import Place
from forge_data.sources.config import SourceConfig, Split
from forge_data.sources.items import ItemReader
from forge_data.store.tokenize import Progress


@dataclass
class Loader:
    """Iterates over this rank's parts of the global batches, each a list of micro-batches.

    The whole state of the data of a run is `first_sample` plus the samples consumed since, and for streamed
    sources the result of `state`; workers have none.

    Attributes:
        batches: the items.
        workers: number of processes that prepare items ahead; 0 prepares them on demand.
        packings: the sequences of each source, by its place in the configuration.
        fingerprint: identifies data and order; another fingerprint is another stream.
        plan: what the run will read by phase and source, if its number of steps is known.
        last_step: number of whole steps there are data for; None for any number.
        fingerprint_at: returns the fingerprint of the first samples: later phases and skips may still change.
        earlier_at: the same in the form of earlier versions, for old checkpoints; None is all samples.
        sources: the name of each source.
        order: the order of samples from here on; None for a pass over held-out text.
        pins: the versions of streams that have several, by their names in a checkpoint.
        token_bytes: [vocab_size] bytes of each token, for a pass over held-out text; None reports no `bytes`.
        vocab_size: token ids that a model has embeddings for; None for any.
        lacks: for a pass over held-out text, why sources have nothing held out: too few documents.
        pinned: whether micro-batches are in pinned memory; see `micro_batches`.
    """

    batches: Batches
    workers: int
    packings: dict[int, Packing]
    fingerprint: str
    plan: list[str] = field(default_factory=list[str])
    last_step: int | None = None
    fingerprint_at: Callable[[int], str] = field(default=lambda _: "", repr=False)
    earlier_at: Callable[[int | None], str] = field(default=lambda _: "", repr=False)
    sources: tuple[str, ...] = ()
    order: Order | None = field(default=None, repr=False)
    pins: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    token_bytes: np.ndarray | None = field(default=None, repr=False)
    vocab_size: int | None = None
    pinned: bool = False
    lacks: tuple[str, ...] = ()
    _open: list[Workers] = field(default_factory=list[Workers], init=False, repr=False)
    _state: dict[str, Place] = field(default_factory=dict[str, Place], init=False, repr=False)

    def require(self, fingerprint: str | None, samples: int = 0) -> None:
        """Check that the stream is the one that a checkpoint was made on; None is any.

        Args:
            fingerprint: the fingerprint in the checkpoint.
            samples: samples consumed up to it.

        Raises:
            DataError: it is another one.
        """
        earlier = (self.earlier_at(None), self.earlier_at(samples))
        if fingerprint not in (None, self.fingerprint, self.fingerprint_at(samples), *earlier):
            raise DataError(
                "the data are not those the run was trained on so far (content, weights, seed or length of "
                "sequences, or the held-out text differ); bring them back, or start a new run"
            )

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        if isinstance(self.batches, ValidationBatches):
            return self._items(map(self.batches.group, range(len(self.batches))))
        if self.workers == 0:
            return self._items(map(self.batches.group, itertools.count()))
        workers = Workers(self.batches, self.workers)  # they start before the first item is asked for
        self._open.append(workers)
        return self._items(workers, workers.require_alive)

    def _items(
        self, groups: Iterator[Group], check: Callable[[], None] = lambda: None
    ) -> Iterator[list[MicroBatch]]:
        for group in groups:
            self._require_known(group)
            host = self.batches.side.host
            found, self._state = micro_batches(group, self.sources, host, self.pinned), group.state
            if self.token_bytes is not None:
                lengths = torch.from_numpy(np.append(self.token_bytes, 0))  # the last is of what is ignored
                for micro in found:
                    labels, last = micro.inputs["labels"], len(self.token_bytes)
                    known = torch.where((labels >= 0) & (labels < last), labels, last)
                    micro.statistics["bytes"] = lengths[known].sum(1)
            for start in range(0, len(found), self.batches.micro_batches):
                check()
                yield found[start : start + self.batches.micro_batches]

    def _require_known(self, group: Group) -> None:
        """Refuse text with ids that have no embedding, as a tokenizer may have for places of images."""
        if self.vocab_size is None or (most := int(group.rows.max(initial=0))) < self.vocab_size:
            return
        where = (group.rows >= self.vocab_size).any(-1)
        named = ", ".join(self.sources[n] for n in sorted({*group.source[where].tolist()} - {-1}))
        raise DataError(
            f"a text of {named} has the token {most}, and the model embeds {self.vocab_size} ids; what "
            "stands for an image in a text is named by `mark` of its source"
        )

    def state(self) -> dict[str, Any]:
        """Return where the streams' lanes of this rank continue after the last item, as JSON by name."""
        return {**self.pins, **{name: list(place) for name, place in self._state.items()}}

    def tokens_read(self, samples: int) -> dict[str, int]:
        """Return the tokens of each source, padding included, in the first `samples` samples of the run."""
        if self.order is None:
            return {}
        max_tokens = next(iter(self.packings.values())).max_tokens
        counts = self.order.counts(samples).tolist()
        return {name: count * max_tokens for name, count in zip(self.sources, counts, strict=True)}

    def close(self) -> None:
        """End all worker processes; iterators of this loader cannot be used any more."""
        while self._open:
            self._open.pop().close()


def build_loader(
    config: DataConfig,
    split: Split,
    *,
    rank: int = 0,
    world_size: int = 1,
    micro_batch: int,
    global_batch: int = 0,
    first_sample: int = 0,
    steps: int | None = None,
    state: Mapping[str, Any] | None = None,
    items: ItemReader | None = None,
    on_progress: Progress | None = None,
) -> Loader:
    """Build the loader of one rank.

    Args:
        config: the section `[data]`.
        split: `train` is endless and shuffled, `validation` one pass in order.
        rank: rank of this process among the ranks that read different data.
        world_size: number of these ranks. The global batches do not depend on it.
        micro_batch: sequences a rank holds at once.
        global_batch: sequences an optimizer step over all ranks; training only.
        first_sample: samples consumed so far, after which the stream continues.
        steps: steps of the whole run, if known: for the starts of phases, and whether the sources suffice.
        state: the results of `Loader.state` of all ranks, of any number, after `first_sample` samples; other
            entries are ignored. Needed where sources are streamed.
        items: the reader of items such as images; sources get it as `Opening.items`.
        on_progress: receives the progress while text is tokenized.

    Raises:
        DataError: data are missing, sources contradict each other in their inputs beside tokens, or the
            global batch cannot be cut evenly.
    """
    _require_numbers(rank, world_size, micro_batch, first_sample)
    contents: dict[Path, str] = {}  # each file is read once, for what is trained on and what is held out
    lacks: list[str] = []
    packings = build_packings(config, split, on_progress, items, contents, lacks)
    names = tuple(config.source_names())
    content = [(number, f"{number} {_content(packing, items)}") for number, packing in packings.items()]
    cuts = packing_parts(config)
    if split == "validation":
        evenly = ValidationBatches(packings, micro_batch, config.validation_samples, rank, world_size, names)
        named, lengths = fingerprint(config, [text for _, text in content], cuts), _token_bytes(config)
        return Loader(evenly, 0, packings, named, sources=names, token_bytes=lengths, lacks=tuple(lacks))
    # The held-out text belongs to what a run is: its evaluations are to be compared.
    held_out = held_out_digests(config, on_progress, items, contents)
    content += [(number, f"{number} {digest}") for number, digest in held_out.items()]
    _require_even(global_batch, micro_batch, world_size)
    streams = build_streams(config, global_batch, state or {}, started=first_sample > 0, items=items)
    for number, stream in streams.items():
        _require_shared(names[number], stream.lanes, world_size)
    packings = dict(sorted((packings | streams).items()))
    run = Run(global_batch, steps)
    order = build_order(config, [len(p) for p in packings.values()], run)
    named, named_before = (
        [(n, f"stream {n} {s.lanes} {digest(s)}") for n, s in streams.items()]
        for digest in (attrgetter("digest"), attrgetter("file_digest"))
    )
    of_now, of_earlier = (Trained(config, order, run, content, cuts, n) for n in (named, named_before))
    cut = packings, micro_batch, order, first_sample, global_batch, rank, world_size, names
    return Loader(
        StreamedBatches(streams, *cut) if streams else TrainBatches(*cut),
        config.workers,
        packings,
        of_now.fingerprint(None),
        plan_lines(config, order, run),
        last_step(order, run),
        of_now.fingerprint,
        of_earlier.fingerprint,
        names,
        order,
        {pin_key(number): stream.source.pin for number, stream in streams.items() if stream.source.pin},
    )


@dataclass(frozen=True)
class Trained:
    """The data of a run, by the names that make up a fingerprint.

    Attributes:
        config: the section `[data]`.
        order: the order of the samples.
        run: its steps and its global batch.
        content: the number of each source and the digest of its text, held-out text included.
        cuts: how texts are cut into sequences.
        streams: the number and the name of each streamed source.
    """

    config: DataConfig
    order: Order
    run: Run
    content: Sequence[tuple[int, str]]
    cuts: list[str]
    streams: Sequence[tuple[int, str]]

    def fingerprint(self, samples: int | None) -> str:
        """Return the fingerprint of the sources that have joined after `samples` samples; None: of all."""
        joined = num_joined(self.config, self.run, samples)
        of_joined = structs.replace(self.config, sources=self.config.sources[:joined], phases=[])
        texts, streams = ([name for n, name in names if n < joined] for names in (self.content, self.streams))
        parts = fingerprint_parts(self.config, self.order, self.run, samples)
        return fingerprint(of_joined, texts, self.cuts + streams + parts)


def build_set_loader(
    config: DataConfig,
    sources: Sequence[SourceConfig],
    samples: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    micro_batch: int,
    items: ItemReader | None = None,
    on_progress: Progress | None = None,
) -> Loader:
    """Build one pass over text other than the run's, cut as the run cuts its own.

    Args:
        config: the section `[data]` of the run.
        sources: the sources of the text; nothing of it is held out.
        samples: number of evenly spaced sequences; 0 reads all.
        rank: rank of this process among the ranks that read different data.
        world_size: number of these ranks.
        micro_batch: sequences a rank holds at once.
        items: the reader of items such as images.
        on_progress: receives the progress while text is tokenized.

    Raises:
        DataError: data are missing, or cannot be cut as asked.
    """
    of_set = structs.replace(config, sources=[s.whole() for s in sources], phases=[], skip=[])
    packings, names = build_packings(of_set, "train", on_progress, items), tuple(of_set.source_names())
    evenly = ValidationBatches(packings, micro_batch, samples, rank, world_size, names)
    lengths = _token_bytes(config)
    return Loader(evenly, 0, packings, "", sources=names, token_bytes=lengths)


def _token_bytes(config: DataConfig) -> np.ndarray | None:
    tell = getattr(config.tokenizer.build(), "token_bytes", None)  # a tokenizer of one's own may have none
    return None if tell is None else tell()


def _content(packing: Packing, items: ItemReader | None) -> str:
    """Return the name of a source's content; with another reader of items its rows are others."""
    return packing.digest if items is None or not packing.ragged else f"{packing.digest} {items.digest}"


def fingerprint(config: DataConfig, content: Sequence[str], named: Sequence[str]) -> str:
    """Name a stream: the content of every source and split, the weights, the seed, how sequences are cut."""
    parts = [
        *content,
        *(repr(s.weight) for s in config.sources),
        repr((VERSION, config.seed, config.max_tokens, config.mask_documents)),
        *named,
    ]
    return xxhash.xxh3_128_hexdigest("/".join(parts).encode())


def _require_numbers(rank: int, world_size: int, micro_batch: int, first_sample: int) -> None:
    if not (0 <= rank < world_size and micro_batch >= 1 and first_sample >= 0):
        raise DataError(
            f"rank {rank} of {world_size}, micro_batch {micro_batch}, first_sample {first_sample}: expected "
            "a rank from 0 below world_size, a micro_batch from 1 and a first_sample from 0"
        )


def _require_even(global_batch: int, micro_batch: int, world_size: int) -> None:
    portion = micro_batch * world_size
    if global_batch < 1 or global_batch % portion:
        lower = global_batch // portion * portion
        near = f"{lower} or {lower + portion}" if lower else f"{portion}"
        fitting = [m for m in range(1, micro_batch + 1) if global_batch % (m * world_size) == 0]
        ranks = [n for n in range(1, world_size) if global_batch % (n * micro_batch) == 0]
        micro = f", or a micro-batch of {fitting[-1]}" if fitting else ""
        fewer = f", or {ranks[-1]} ranks" if ranks and global_batch else ""
        raise DataError(
            f"a global batch of {global_batch} sequences cannot be cut into micro-batches of {micro_batch} "
            f"on {world_size} ranks; use a global batch of {near}{micro}{fewer}"
        )


def _require_shared(name: str, lanes: int, world_size: int) -> None:
    """Check that each lane of a stream is read by one rank."""
    if lanes % world_size:
        fitting = [n for n in range(1, lanes + 1) if lanes % n == 0]
        raise DataError(
            f"the stream {name} has {lanes} lanes, which {world_size} ranks that read cannot share evenly; "
            f"use {', '.join(map(str, fitting[-5:]))} ranks, or in a new run set `lanes` to a multiple of "
            f"{world_size}"
        )
