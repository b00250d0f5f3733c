"""What each item of a stream holds: sequences cut by rank and micro-batch, as arrays. B sequences, T tokens.

Nothing here imports torch, so that the processes that prepare batches start quickly and stay small.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forge_data.order import Order
from forge_data.windows import IGNORE, Windows

LOOKAHEAD = 4096
"""Samples located at once: far fewer and larger array operations."""
READ_TOKENS, READ_SEQUENCES = 1 << 15, 64
"""What is read at once, for the same reason, at most; a file that shrinks meanwhile kills the process."""


class Arrays(NamedTuple):
    """A micro-batch as arrays; see `forge_data.loader.MicroBatch`."""

    inputs: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]


class Places(NamedTuple):
    """Where sequences lie.

    Attributes:
        source: [n] int64, the index of the source; negative is padding.
        sample: [n] int64, which one of that source.
        overlap: [n] int64, how many leading targets the sequence before has had.
        is_plain: all are of one source and have no overlap, so that nothing is to be masked or mixed.
    """

    source: np.ndarray
    sample: np.ndarray
    overlap: np.ndarray
    is_plain: bool


class Batches:
    """Item i is this rank's part of global batch i, as micro-batches. An item depends on i alone.

    Attributes:
        together: items that are read at once, when one of them is asked for.
    """

    together = 1

    def __init__(self, windows: dict[int, Windows], mask_documents: bool, micro_batch: int) -> None:
        self._windows = windows
        self._mask_documents = mask_documents
        self._micro_batch = micro_batch
        self._max_tokens = next(iter(windows.values())).max_tokens

    def locate(self, index: int) -> Places:
        """Where the sequences of item `index` lie."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> list[Arrays]:
        """Item `index`.

        Raises:
            DataError: what is read is damaged, or no longer there.
        """
        places, rows = self.locate(index), self.read(index)
        if len(places.source) <= self._micro_batch:
            return [self._cut(rows, *places)]
        cuts = [slice(c, c + self._micro_batch) for c in range(0, len(places.source), self._micro_batch)]
        return [
            self._cut(rows[c], places.source[c], places.sample[c], places.overlap[c], places.is_plain)
            for c in cuts
        ]

    def read(self, index: int) -> np.ndarray:
        """[n, T + 1] int64: the tokens of item `index`.

        Raises:
            DataError: they are damaged, or no longer there.
        """
        places = self.locate(index)
        return self._tokens(places.source, places.sample)

    def _cut(
        self, rows: np.ndarray, source: np.ndarray, sample: np.ndarray, overlap: np.ndarray, is_plain: bool
    ) -> Arrays:
        inputs = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
        targets = len(rows) * self._max_tokens
        if not is_plain or self._mask_documents:
            ignored = (np.arange(self._max_tokens) < overlap[:, None]) | (source < 0)[:, None]
            if self._mask_documents:
                doc_ids, inputs["positions"] = self._documents(source, sample)
                ignored |= doc_ids[:, 1:] != doc_ids[:, :-1]
                inputs["doc_ids"] = doc_ids[:, :-1]
            inputs["labels"] = np.where(ignored, IGNORE, inputs["labels"])
            targets -= np.count_nonzero(ignored)
        return Arrays(inputs, {"source": source.copy(), "targets": np.asarray(targets)})

    def _tokens(self, source: np.ndarray, sample: np.ndarray) -> np.ndarray:
        """[n, T + 1] int64 tokens of sequences; zeros where there is padding."""
        for windows in self._windows.values():
            windows.store.require_files()
        only = self._windows.get(int(source[0]))
        if only is not None and (source == source[0]).all():
            return only.read(sample)
        rows = np.zeros((len(source), self._max_tokens + 1), dtype=np.int64)
        for number, windows in self._windows.items():
            here = np.flatnonzero(source == number)
            if len(here):
                rows[here] = windows.read(sample[here])
        return rows

    def _documents(self, source: np.ndarray, sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[B, T + 1] documents, [B, T] positions; zeros where there is padding."""
        shape = len(source), self._max_tokens + 1
        doc_ids, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for number, windows in self._windows.items():
            here = np.flatnonzero(source == number)
            if len(here):
                doc_ids[here], positions[here] = windows.documents(sample[here])
        return doc_ids, positions[:, :-1]

    def _overlap(self, source: np.ndarray, sample: np.ndarray) -> np.ndarray:
        """How many leading targets of each sequence the sequence before has had, in the shape of `source`."""
        overlap = np.zeros_like(sample)
        for number, windows in self._windows.items():
            here = source == number
            overlap[here] = windows.overlap(sample[here])
        return overlap


class TrainBatches(Batches):
    """Endless: global batch i is the samples from first + i * global_batch on, cut evenly by rank."""

    def __init__(
        self,
        windows: dict[int, Windows],
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
        sequences = min(READ_TOKENS // self._max_tokens, READ_SEQUENCES)
        self.together = max(1, sequences // self._share)
        self._ahead = -(-max(1, LOOKAHEAD // self._share) // self.together) * self.together
        self._chunk = self._group = -1
        self._located: list[Places] = []
        self._rows = np.empty((0, 0, 0), dtype=np.int64)

    def locate(self, index: int) -> Places:
        """See `Batches.locate`."""
        chunk, row = divmod(index, self._ahead)
        if chunk != self._chunk:
            self._chunk, self._located = chunk, self._locate(chunk)
        return self._located[row]

    def read(self, index: int) -> np.ndarray:
        """See `Batches.read`; items that follow one another are read together."""
        group, row = divmod(index, self.together)
        if group != self._group:
            items = [self.locate(group * self.together + n) for n in range(self.together)]
            source = np.concatenate([places.source for places in items])
            sample = np.concatenate([places.sample for places in items])
            self._rows = self._tokens(source, sample).reshape(len(items), self._share, -1)
            self._group = group
        return self._rows[row]

    def _locate(self, chunk: int) -> list[Places]:
        items = np.arange(chunk * self._ahead, (chunk + 1) * self._ahead, dtype=np.int64)
        ordinals = self._first + items[:, None] * self._global_batch + np.arange(self._share)
        source, sample = (part.reshape(ordinals.shape) for part in self._order.locate(ordinals.ravel()))
        overlap = self._overlap(source, sample)
        is_plain = (source == source[:, :1]).all(axis=1) & ~overlap.any(axis=1)
        return [Places(*row) for row in zip(source, sample, overlap, is_plain.tolist(), strict=True)]


class ValidationBatches(Batches):
    """Finite: evenly spaced sequences of all sources, each on exactly one rank; ranks are padded alike."""

    def __init__(
        self,
        windows: dict[int, Windows],
        mask_documents: bool,
        micro_batch: int,
        samples: int,
        rank: int,
        world_size: int,
    ) -> None:
        super().__init__(windows, mask_documents, micro_batch)
        self._numbers = np.asarray(list(windows))
        self._ends = np.cumsum([len(w) for w in windows.values()])
        total = int(self._ends[-1])
        self._samples = min(samples, total) if samples else total
        self._total = total
        self._stride = micro_batch * world_size
        self._rank = rank

    def __len__(self) -> int:
        return -(-self._samples // self._stride)

    def locate(self, index: int) -> Places:
        """See `Batches.locate`."""
        first = index * self._stride + self._rank * self._micro_batch
        ordinal = np.arange(first, first + self._micro_batch, dtype=np.int64)
        spread = np.minimum(ordinal, self._samples - 1) * self._total // self._samples
        nth = np.searchsorted(self._ends, spread, side="right")
        sample = spread - np.concatenate([[0], self._ends])[nth]
        source = np.where(ordinal < self._samples, self._numbers[nth], -1)
        return Places(source, sample, self._overlap(source, sample), is_plain=False)
