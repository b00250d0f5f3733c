"""The items of a stream: sequences cut by rank and micro-batch, as arrays. B sequences, T tokens.

Consecutive items are read together, as a group: G items of M micro-batches. This module does not import
torch, so that the processes that prepare batches start quickly and stay small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from forge_data.loading.side import SideData
from forge_data.order.order import Order
from forge_data.packing.build import state_key
from forge_data.packing.packing import IGNORE, Packing, Ragged
from forge_data.packing.stream import Place, Stream

LOOKAHEAD = 1 << 14
"""Samples located at once: far fewer and larger array operations."""
READ_TOKENS, READ_SEQUENCES = 1 << 16, 256
"""What is read at once, for the same reason, at most: half a megabyte, which stays in the cache of a core.

The sizes of files are looked at before each read; a file that shrinks within one kills the process.
"""
GROUP_BYTES = 8 << 20
"""What a group has beside tokens at most, unless a single item has more."""


class Group(NamedTuple):
    """Items that were read together; the micro-batches of all of them are along the first axis.

    Attributes:
        rows: [G * M, B, T + 1] int64; inputs are all but the last token of a row, targets all but the first.
        labels: [G * M, B, T] int64 where some targets are ignored; None where none is.
        extra: further inputs of the model, such as `doc_ids`: [G * M, B, ...].
        ragged: further inputs with a different number of rows for each sequence; counts [G * M, B].
        source: [G * M, B] int64, the index of the source of each sequence, -1 for padding.
        targets: [G * M] int64, number of labels that are not ignored.
        state: where the streams of this rank continue after the group, by `state_key`; sources with random
            access have none.
    """

    rows: np.ndarray
    labels: np.ndarray | None
    extra: dict[str, np.ndarray]
    ragged: dict[str, Ragged]
    source: np.ndarray
    targets: np.ndarray
    state: dict[str, Place] = {}


class Batches:
    """Item i is this rank's part of global batch i, as micro-batches. An item depends on i alone.

    Attributes:
        together: G, items of a group.
        micro_batches: M, micro-batches of an item.
        side: the inputs of each item beside tokens.
    """

    together = 1
    micro_batches = 1

    def __init__(self, packings: Mapping[int, Packing], micro_batch: int, names: Sequence[str] = ()) -> None:
        self._packings = dict(packings)
        self.side = SideData(self._packings, names)
        self._micro_batch = micro_batch
        self._max_tokens = next(iter(packings.values())).max_tokens

    def locate(self, group: int) -> tuple[np.ndarray, np.ndarray]:
        """Return source (negative is padding) and sample, two [n] int64, of the sequences of a group."""
        raise NotImplementedError

    def token_counts(self, group: int) -> np.ndarray:
        """Return the number of tokens without padding of each sequence of a group: [n] int64."""
        source, sample = self.locate(group)
        counts = np.zeros(len(source), dtype=np.int64)
        for number, packing in self._packings.items():
            here = np.flatnonzero(source == number)
            counts[here] = packing.token_counts(sample[here])
        return counts

    def group(self, index: int) -> Group:
        """Return the items from `index * together` on.

        Raises:
            DataError: the data are damaged, or no longer there.
        """
        source, sample = self.locate(index)
        rows, ignored, extra, ragged = self._read(source, sample)
        micro = (-1, self._micro_batch)
        targets = np.full(len(rows) // self._micro_batch, self._micro_batch * self._max_tokens)
        labels = None
        if ignored:
            labels = rows[:, 1:].copy()
            for at in ignored:
                labels[at] = IGNORE
            targets = np.count_nonzero((labels >= 0).reshape(len(targets), -1), axis=1)
            labels = labels.reshape(*micro, self._max_tokens)
        return Group(
            rows.reshape(*micro, self._max_tokens + 1),
            labels,
            {name: array.reshape(*micro, *array.shape[1:]) for name, array in extra.items()},
            {name: Ragged(values, counts.reshape(micro)) for name, (values, counts) in ragged.items()},
            source.reshape(micro),
            targets,
        )

    def _read(
        self, source: np.ndarray, sample: np.ndarray
    ) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]], dict[str, np.ndarray], dict[str, Ragged]]:
        """Return tokens [n, T + 1], places in [n, T] without target, and other inputs of each sequence."""
        here = {number: np.flatnonzero(source == number) for number in self._packings}
        for packing in self._packings.values():
            packing.require_files()
        read = {n: self._packings[n].read(sample[at]) for n, at in here.items() if len(at)}
        extra, ragged = self.side.joined(len(source), here, read)
        ignored = [(here[n][r.ignored[0]], r.ignored[1]) for n, r in read.items() if len(r.ignored[0])]
        if len(read) == 1 and len(here[first := next(iter(read))]) == len(source):
            return read[first].tokens.astype(np.int64, copy=False), ignored, extra, ragged
        if len(padding := np.flatnonzero(source < 0)):
            ignored.append((padding[:, None], np.arange(self._max_tokens)))
            if "doc_ids" in extra:
                extra["doc_ids"][padding] = -1
        rows = np.zeros((len(source), self._max_tokens + 1), dtype=np.int64)
        for number, part in read.items():
            rows[here[number]] = part.tokens
        return rows, ignored, extra, ragged


class TrainBatches(Batches):
    """Global batch i is the samples from first + i * global_batch on, cut evenly by rank; endless, or padded.

    Where the sources run out, padding fills the batch, and the other batches of its group.
    """

    def __init__(
        self,
        packings: Mapping[int, Packing],
        micro_batch: int,
        order: Order,
        first_sample: int,
        global_batch: int,
        rank: int,
        world_size: int,
        names: Sequence[str] = (),
    ) -> None:
        super().__init__(packings, micro_batch, names)
        self._order = order
        self._share = global_batch // world_size
        self.micro_batches = self._share // micro_batch
        self._first = first_sample + rank * self._share
        self._global_batch = global_batch
        fitting = GROUP_BYTES // max(1, self.side.sequence_bytes)
        sequences = min(READ_TOKENS // self._max_tokens, READ_SEQUENCES, fitting)
        self.together = max(1, sequences // self._share)
        self._ahead = max(1, LOOKAHEAD // (self._share * self.together))
        self._chunk = -1
        self._located: tuple[np.ndarray, np.ndarray] = (np.empty(0), np.empty(0))

    def locate(self, group: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Batches.locate`; groups that follow one another are located together."""
        chunk, row = divmod(group, self._ahead)
        if chunk != self._chunk:
            self._chunk, self._located = chunk, self._locate(chunk)
        source, sample = self._located
        if source[row, 0] < 0:
            self._order.locate(np.asarray([self._first + group * self.together * self._global_batch]))
        return source[row], sample[row]

    def _locate(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """[groups, n] sources and samples."""
        count = self._ahead * self.together
        items = np.arange(chunk * count, (chunk + 1) * count, dtype=np.int64)
        ordinals = self._first + items[:, None] * self._global_batch + np.arange(self._share)
        places, end = ordinals.ravel(), self._order.num_samples
        if end is None:
            source, sample = self._order.locate(places)
        else:
            # What is looked at ahead may lie behind the end; only who asks for it hears of that.
            source, sample = self._order.locate(np.minimum(places, max(end - 1, int(places[0]))))
            source[places >= end] = -1
        return source.reshape(self._ahead, -1), sample.reshape(self._ahead, -1)


class StreamedBatches(TrainBatches):
    """Train batches with streamed sources: groups are read one after the other, from 0 on.

    Slot j of every global batch reads lane j * lanes / global_batch of the stream it falls to: so a lane
    belongs to one rank, whatever the mixture. Skipped steps are read and discarded.
    """

    def __init__(self, streams: Mapping[int, Stream], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._streams = dict(streams)
        self._ahead, self.together = self._ahead * self.together, 1
        self._slots = self._first % self._global_batch + np.arange(self._share)
        self._begin = self._first - int(self._slots[0])
        self._next = 0

    def _locate(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        source, sample = super()._locate(chunk)
        for number, lanes in self._lanes():
            sample = np.where(source == number, np.broadcast_to(lanes, source.shape), sample)
        return source, sample

    def _lanes(self) -> list[tuple[int, np.ndarray]]:
        """Return, for each stream, its number and the lane that each slot of this rank reads."""
        batch, streams = self._global_batch, self._streams.items()
        return [(number, self._slots * stream.lanes // batch) for number, stream in streams]

    def _pass_over(self, place: int) -> None:
        """Read the skipped samples right before a batch, so that the lanes are behind them."""
        skips = self._order.skips
        before = skips.ordinal(place - 1) if place else -1
        for first in range(before + 1, skips.ordinal(place), self._global_batch):
            source, _ = self._order.locate_ordinals(first + self._slots)
            for number, lanes in self._lanes():
                if len(mine := lanes[source == number]):
                    self._streams[number].read(mine)

    def group(self, index: int) -> Group:
        """See `Batches.group`."""
        if index == 0:
            self._next = 0
            for stream in self._streams.values():
                stream.restart()
        assert index == self._next, f"group {index} of a stream was asked for after group {self._next - 1}"
        self._next += 1
        self._pass_over(self._begin + index * self._global_batch)
        return super().group(index)._replace(state=self.places())

    def places(self) -> dict[str, Place]:
        """Return where the lanes of this rank continue."""
        return {
            state_key(number, lane): place
            for number, lanes in self._lanes()
            for lane, place in self._streams[number].places(np.unique(lanes).tolist()).items()
        }


class ValidationBatches(Batches):
    """Finite: evenly spaced sequences of all sources, each on exactly one rank; ranks are padded alike."""

    def __init__(
        self,
        packings: Mapping[int, Packing],
        micro_batch: int,
        samples: int,
        rank: int,
        world_size: int,
        names: Sequence[str] = (),
    ) -> None:
        super().__init__(packings, micro_batch, names)
        self._numbers = np.asarray(list(packings))
        self._ends = np.cumsum([len(packing) for packing in packings.values()])
        total = int(self._ends[-1])
        self._samples = min(samples, total) if samples else total
        self._total = total
        self._stride = micro_batch * world_size
        self._rank = rank

    def __len__(self) -> int:
        return -(-self._samples // self._stride)

    def locate(self, group: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Batches.locate`."""
        first = group * self._stride + self._rank * self._micro_batch
        ordinal = np.arange(first, first + self._micro_batch, dtype=np.int64)
        spread = np.minimum(ordinal, self._samples - 1) * self._total // self._samples
        nth = np.searchsorted(self._ends, spread, side="right")
        sample = spread - np.concatenate([[0], self._ends])[nth]
        return np.where(ordinal < self._samples, self._numbers[nth], -1), sample
