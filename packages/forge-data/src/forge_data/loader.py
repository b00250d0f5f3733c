"""From the order of samples to this rank's part of each global batch. B sequences, T tokens."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.order import VERSION, Order
from forge_data.sources import Split
from forge_data.windows import IGNORE, Windows


class MicroBatch(NamedTuple):
    """Sequences that a rank holds at once.

    Attributes:
        inputs: what the model takes: `tokens` and `labels` [B, T] int64; with `mask_documents` also `doc_ids`
            and `positions` [B, T] int64.
        statistics: what it does not: `source` [B] int64, the index of the source of each sequence, -1 for
            padding; `targets` [] int64, how many labels are not ignored.
    """

    inputs: dict[str, Tensor]
    statistics: dict[str, Tensor]

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on a device, copied without waiting where the memory allows it."""
        return MicroBatch(*({k: v.to(device, non_blocking=True) for k, v in part.items()} for part in self))


def cache_folder(config: DataConfig) -> Path:
    """Where tokenized text is kept."""
    named = config.cache_dir or os.environ.get("FORGE_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "forge"


def open_windows(config: DataConfig, split: Split) -> list[Windows]:
    """The sequences of each source.

    Raises:
        DataError: data are missing, damaged, or too short.
    """
    cache = cache_folder(config)
    stores = [source.open(split, config.tokenizer, cache) for source in config.sources]
    return [Windows(store, config.max_tokens) for store in stores]


class Batches(Dataset[list[MicroBatch]]):
    """Item i is this rank's part of global batch i, as micro-batches. An item depends on i alone."""

    def __init__(self, windows: list[Windows], mask_documents: bool, micro_batch: int) -> None:
        self._windows = windows
        self._mask_documents = mask_documents
        self._micro_batch = micro_batch

    def locate(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and sample of each sequence of item `index`; a negative source is padding."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> list[MicroBatch]:
        source, sample = self.locate(index)
        cuts = range(0, len(source), self._micro_batch)
        return [
            self._read(source[c : c + self._micro_batch], sample[c : c + self._micro_batch]) for c in cuts
        ]

    def _read(self, source: np.ndarray, sample: np.ndarray) -> MicroBatch:
        parts = [(s, source == s) for s in range(len(self._windows))]
        parts = [(self._windows[s], here) for s, here in parts if here.any()]
        if len(parts) == 1 and parts[0][1].all():
            rows = parts[0][0].read(sample).astype(np.int64)
        else:
            rows = np.zeros((len(source), self._windows[0].max_tokens + 1), dtype=np.int64)
            for windows, here in parts:
                rows[here] = windows.read(sample[here])
        ignored = self._ignored(source, sample, parts)
        inputs = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
        if self._mask_documents:
            doc_ids, inputs["positions"] = self._documents(rows.shape, sample, parts)
            ignored = ignored | (np.diff(doc_ids, axis=1) != 0)
            inputs["doc_ids"] = doc_ids[:, :-1]
        targets = inputs["labels"].size
        if np.any(ignored):
            inputs["labels"] = np.where(ignored, IGNORE, inputs["labels"])
            targets = np.count_nonzero(inputs["labels"] != IGNORE)
        return MicroBatch(
            {name: torch.from_numpy(array) for name, array in inputs.items()},
            {"source": torch.from_numpy(source), "targets": torch.tensor(targets)},
        )

    def _ignored(
        self, source: np.ndarray, sample: np.ndarray, parts: list[tuple[Windows, np.ndarray]]
    ) -> np.ndarray:
        """[B, T] or [B, 1] bool: labels of padding, and targets an earlier sequence has had."""
        ignored = (source < 0)[:, None]
        for windows, here in parts:
            overlap = np.where(here, windows.overlap(sample), 0)[:, None]
            if overlap.any():
                ignored = ignored | (np.arange(windows.max_tokens) < overlap)
        return ignored

    def _documents(
        self, shape: tuple[int, ...], sample: np.ndarray, parts: list[tuple[Windows, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """[B, T + 1] documents, [B, T] positions; zeros where there is padding."""
        doc_ids, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for windows, here in parts:
            doc_ids[here], positions[here] = windows.documents(sample[here])
        return doc_ids, positions[:, :-1]


LOOKAHEAD = 4096
"""Samples located at once: far fewer and larger array operations."""


class TrainBatches(Batches):
    """Endless: global batch i is the samples from first + i * global_batch on, cut evenly by rank."""

    def __init__(
        self,
        windows: list[Windows],
        mask_documents: bool,
        micro_batch: int,
        order: Order,
        first_sample: int,
        global_batch: int,
        rank: int,
        world_size: int,
    ) -> None:
        super().__init__(windows, mask_documents, micro_batch)
        self._order = order
        self._share = global_batch // world_size
        self._first = first_sample + rank * self._share
        self._global_batch = global_batch
        self._ahead = max(1, LOOKAHEAD // self._share)
        self._located: tuple[int, np.ndarray, np.ndarray] | None = None

    def locate(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Batches.locate`."""
        chunk, row = divmod(index, self._ahead)
        if self._located is None or self._located[0] != chunk:
            items = np.arange(chunk * self._ahead, (chunk + 1) * self._ahead, dtype=np.int64)
            ordinals = self._first + items[:, None] * self._global_batch + np.arange(self._share)
            source, sample = self._order.locate(ordinals.ravel())
            self._located = chunk, source.reshape(ordinals.shape), sample.reshape(ordinals.shape)
        return self._located[1][row], self._located[2][row]


class ValidationBatches(Batches):
    """Finite: evenly spaced sequences of all sources, each on exactly one rank; ranks are padded alike."""

    def __init__(
        self,
        windows: list[Windows],
        mask_documents: bool,
        micro_batch: int,
        samples: int,
        rank: int,
        world_size: int,
    ) -> None:
        super().__init__(windows, mask_documents, micro_batch)
        self._ends = np.cumsum([len(w) for w in windows])
        total = int(self._ends[-1])
        self._samples = min(samples, total) if samples else total
        self._total = total
        self._stride = micro_batch * world_size
        self._rank = rank

    def __len__(self) -> int:
        return -(-self._samples // self._stride)

    def locate(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Batches.locate`."""
        start = index * self._stride + self._rank * self._micro_batch
        ordinal = np.arange(start, start + self._micro_batch, dtype=np.int64)
        spread = np.minimum(ordinal, self._samples - 1) * self._total // self._samples
        source = np.searchsorted(self._ends, spread, side="right")
        sample = spread - np.concatenate([[0], self._ends])[source]
        return np.where(ordinal < self._samples, source, -1), sample


@dataclass
class Loader:
    """Iterates over this rank's parts of the global batches, each a list of micro-batches.

    The whole state of the data of a run is `first_sample` plus the samples consumed since; workers have none.

    Attributes:
        batches: what item i is.
        workers: processes that prepare items ahead; 0 prepares them when asked.
        windows: the sequences of each source.
        fingerprint: names data and order; another fingerprint is another stream.
    """

    batches: Batches
    workers: int
    windows: list[Windows]
    fingerprint: str

    def require(self, fingerprint: str | None) -> None:
        """See that the stream is the one a checkpoint was made on; None is any.

        Raises:
            DataError: it is another one.
        """
        if fingerprint not in (None, self.fingerprint):
            raise DataError(
                "the data are not those the run was trained on so far (content, weights, seed or length of "
                "sequences differ); bring them back, or start a new run"
            )

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        endless = isinstance(self.batches, TrainBatches)
        indices = itertools.count() if endless else range(len(self.batches))  # type: ignore[arg-type]
        if self.workers == 0:
            return map(self.batches.__getitem__, indices)
        return iter(
            DataLoader(
                self.batches,
                batch_size=None,
                sampler=indices,  # type: ignore[arg-type]
                num_workers=self.workers,
                worker_init_fn=_ignore_signals,
            )
        )


def _ignore_signals(worker: int) -> None:
    """Schedulers signal all processes of a job; it is the training process that decides what happens."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def build_loader(
    config: DataConfig,
    split: Split,
    *,
    rank: int = 0,
    world_size: int = 1,
    micro_batch: int,
    global_batch: int = 0,
    first_sample: int = 0,
) -> Loader:
    """The loader of one rank.

    Args:
        config: the section `[data]`.
        split: `train` is endless and shuffled, `validation` one pass in order.
        rank: of this process among those that read different data.
        world_size: how many those are. The global batches do not depend on it.
        micro_batch: sequences a rank holds at once.
        global_batch: sequences an optimizer step over all ranks; training only.
        first_sample: the global index to start at: samples consumed so far.

    Raises:
        DataError: data are missing, or the global batch cannot be cut evenly.
    """
    if not (0 <= rank < world_size and micro_batch >= 1 and first_sample >= 0):
        raise DataError(
            f"rank {rank} of {world_size}, micro_batch {micro_batch}, first_sample {first_sample}: expected "
            "a rank from 0 below world_size, a micro_batch from 1 and a first_sample from 0"
        )
    windows = open_windows(config, split)
    if split == "validation":
        batches: Batches = ValidationBatches(
            windows, config.mask_documents, micro_batch, config.validation_samples, rank, world_size
        )
    else:
        _require_even(global_batch, micro_batch, world_size)
        order = Order(config.seed, [len(w) for w in windows], [s.weight for s in config.sources])
        batches = TrainBatches(
            windows, config.mask_documents, micro_batch, order, first_sample, global_batch, rank, world_size
        )
    return Loader(batches, config.workers if split == "train" else 0, windows, fingerprint(config, windows))


def fingerprint(config: DataConfig, windows: list[Windows]) -> str:
    """Names the stream: the content of every source, the weights, the seed, and how sequences are cut."""
    parts = [
        *(w.store.manifest.digest for w in windows),
        *(repr(s.weight) for s in config.sources),
        repr((VERSION, config.seed, config.max_tokens, config.mask_documents)),
    ]
    return xxhash.xxh3_128_hexdigest("/".join(parts).encode())


def _require_even(global_batch: int, micro_batch: int, world_size: int) -> None:
    portion = micro_batch * world_size
    if global_batch < 1 or global_batch % portion:
        lower = global_batch // portion * portion
        near = f"{lower} or {lower + portion}" if lower else f"{portion}"
        fitting = [m for m in range(1, micro_batch + 1) if global_batch % (m * world_size) == 0]
        micro = f", or a micro-batch of {fitting[-1]}" if fitting else ""
        raise DataError(
            f"a global batch of {global_batch} sequences cannot be cut into micro-batches of {micro_batch} "
            f"on {world_size} ranks; use a global batch of {near}{micro}"
        )
