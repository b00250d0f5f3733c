"""Text that is read while a run trains, without a store: tokenized, shuffled and cut on the way. T tokens.

The parts of all files are dealt to lanes. Each lane reads its parts window by window, in an order that is a
function of the seed, shuffles the documents of a window, lays them end to end and cuts them into sequences.
A place in a lane is three integers, so that a checkpoint holds no text. The lanes are the same for any number
of ranks: each rank reads some of them, and a run goes on with the same global batches on other ranks.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forge_data.error import DataError
from forge_data.order.order import key, permute
from forge_data.packing.concat import documents as documents_of_rows
from forge_data.packing.packing import Sequences, TextPacking
from forge_data.sources.columns import Columns, Document, named
from forge_data.sources.documents import Task, documents, were_text
from forge_data.sources.remote import patiently
from forge_data.tokenizer.encoding import encoded
from forge_data.tokenizer.tokenizer import Tokenizer, TokenizerConfig

ENDLESS = 1 << 40
"""How many sequences a stream is said to have: more than any run reads."""

MAX_LANES = 64
"""Lanes at most where nobody says how many: each holds the text of a window."""

VERSION = 1
"""Another number when the same files and seed would give another order."""


@dataclass(frozen=True)
class StreamedText:
    """What a stream reads.

    Attributes:
        tasks: the parts of its files, each of which can be read alone.
        columns: which parts of a row make a document.
        lanes: how many; 0 lets the number of parts and the global batch decide.
        shuffle_parts: parts of a lane whose documents are shuffled together; 0 keeps the order of the files.
        pin: the commit of the files, where they come from the hub.
    """

    tasks: tuple[Task, ...]
    columns: Columns
    lanes: int = 0
    shuffle_parts: int = 2
    pin: str | None = None

    def digest(self, tokenizer: Tokenizer) -> str:
        """Names the files by their names, sizes and parts, or commit, and what is read of them."""
        parts = [(task.name, task.start, task.stop, task.bytes) for task in self.tasks]
        pinned = [] if self.pin is None else [self.pin]
        local = [task.path for task in self.tasks if isinstance(task.path, Path)]
        pinned += ["rows"] * any(were_text(path) for path in local)
        columns = named(self.columns, tokenizer)
        return f"{key(VERSION, columns, self.lanes, self.shuffle_parts, parts, *pinned):016x}"

    def num_lanes(self, global_batch: int) -> int:
        """How many lanes there are: what was asked for, or a divisor of the batch with four parts a lane.

        Raises:
            DataError: the batch cannot be dealt to so many lanes, or there are fewer parts.
        """
        wanted = self.lanes or max(1, min(MAX_LANES, len(self.tasks) // 4))
        if not self.lanes:
            wanted = max(n for n in range(1, wanted + 1) if global_batch % n == 0)
        if wanted > len(self.tasks) or global_batch % wanted:
            fitting = [n for n in range(1, len(self.tasks) + 1) if global_batch % n == 0]
            raise DataError(
                f"given lanes = {wanted} for a stream of {len(self.tasks)} parts (row groups, ranges of "
                f"bytes or files) and a global batch of {global_batch}; expected a divisor of the batch, at "
                f"most one for each part: use {', '.join(map(str, fitting[-4:]))}, or files with more parts"
            )
        return wanted


class Place(NamedTuple):
    """Where the next sequence of a lane begins.

    Attributes:
        window: of parts, counted over all passes.
        document: in the shuffled order of the window.
        token: within the document.
    """

    window: int = 0
    document: int = 0
    token: int = 0


class _Document(NamedTuple):
    place: Place
    ids: np.ndarray
    targets: np.ndarray | None


class _Cut(NamedTuple):
    """A sequence: [T + 1] ids, [T + 1] bool whether each is a target, where documents end within it."""

    ids: np.ndarray
    targets: np.ndarray | None
    ends: list[int]


class _Lane:
    """Every document of its parts once, then all of them again in another order, from a place on."""

    def __init__(self, text: StreamedText, encoder: Tokenizer, seed: int, lane: int, lanes: int) -> None:
        dealt = np.arange(len(text.tasks))
        if text.shuffle_parts:
            dealt = permute(dealt, len(dealt), key(seed, "parts"))
        self._tasks = [text.tasks[number] for number in dealt[lane::lanes]]
        self._text, self._encoder = text, encoder
        self._seed = key(seed, "lane", lane)
        self._together = max(1, text.shuffle_parts)
        self._waiting: deque[_Document] = deque()

    def start(self, place: Place) -> None:
        """Go to a place."""
        self._start = place
        self._waiting.clear()
        self._source = self._documents(place.window, place.document)
        self._skip = place.token

    def place(self) -> Place:
        """Where the next sequence begins."""
        if not self._waiting:
            return self._start
        return self._waiting[0].place._replace(token=self._skip)

    def next(self, max_tokens: int) -> _Cut:
        """The next sequence; its last token is the first of the one that follows."""
        length = max_tokens + 1
        held = sum(len(one.ids) for one in self._waiting) - self._skip
        while held < length:
            self._waiting.append(next(self._source))
            held += len(self._waiting[-1].ids)
        begin, stop = self._skip, self._skip + length
        ids = np.concatenate([one.ids for one in self._waiting])[begin:stop]
        targets = None
        if self._text.columns.masks:
            targets = np.concatenate([one.targets for one in self._waiting if one.targets is not None])
            targets = targets[begin:stop]
        ends = itertools.accumulate(len(one.ids) for one in self._waiting)
        cut = _Cut(ids, targets, [end - begin for end in ends if end <= begin + max_tokens])
        self._skip += max_tokens
        while self._waiting and self._skip >= len(self._waiting[0].ids):
            self._skip -= len(self._waiting.popleft().ids)
        return cut

    def _documents(self, window: int, first: int) -> Iterator[_Document]:
        windows = -(-len(self._tasks) // self._together)
        empty = 0
        while True:
            read = self._window(*divmod(window, windows))
            # None is everywhere; a target without characters is that of the end of the document.
            empty = 0 if any(document.targets != () for document in read) else empty + 1
            if empty == windows:
                names = ", ".join(task.name for task in self._tasks[:3])
                raise DataError(
                    f"no document of {names}, which a lane of a stream reads, has a target: no text, or "
                    "no turn of the assistant (`roles`)"
                )
            order = np.arange(len(read))
            if self._text.shuffle_parts:
                order = permute(order, len(read), key(self._seed, "documents", window))
            for number in range(first, len(read)):
                document = read[int(order[number])]
                ids, targets = encoded(self._encoder, document, self._text.columns.masks)
                yield _Document(Place(window, number), ids, targets)
            window, first = window + 1, 0

    def _window(self, epoch: int, window: int) -> list[Document]:
        """The documents of a window in the order of its parts."""
        order = np.arange(len(self._tasks))
        if self._text.shuffle_parts:
            order = permute(order, len(order), key(self._seed, "epoch", epoch))
        here = order[window * self._together : (window + 1) * self._together]
        return [document for number in here for document in self._read(self._tasks[int(number)])]

    def _read(self, task: Task) -> list[Document]:
        try:
            asked = task, self._text.columns, self._encoder
            found = patiently(task.path, lambda: [document for _, document in documents(*asked)])
        except DataError:
            raise
        except (OSError, ValueError) as error:
            raise DataError(
                f"{task.path} cannot be read: {error}; bring it back as it was when the run began"
            ) from error
        return [document for document in found if document.text]


class Stream(TextPacking):
    """A source that is streamed, as a packing. It is read in order: the sample is the lane to read from.

    Args:
        text: what is read.
        tokenizer: of the text.
        lanes: how many there are.
        seed: of the order.
        max_tokens: T.
        mask_documents: keep attention and targets within documents.
        mask_boundaries: keep targets within documents.
        places: where lanes begin; the start of the stream for those that are not named.
    """

    def __init__(
        self,
        text: StreamedText,
        tokenizer: TokenizerConfig,
        lanes: int,
        seed: int,
        max_tokens: int,
        mask_documents: bool = False,
        mask_boundaries: bool = False,
        places: Mapping[int, Place] | None = None,
    ) -> None:
        self.text, self.lanes, self.max_tokens = text, lanes, max_tokens
        self.mask_documents, self.mask_boundaries = mask_documents, mask_documents or mask_boundaries
        self._tokenizer, self._seed = tokenizer, seed
        self._places = dict(places or {})
        self._open: dict[int, _Lane] = {}

    def __len__(self) -> int:
        return ENDLESS

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}

    def require_files(self) -> None:
        """See `Packing.require_files`: files are opened when they are read."""

    def describe(self) -> str:
        """See `Packing.describe`."""
        return f"streamed: {len(self.text.tasks):,} parts of files in {self.lanes} lanes, no padding"

    @property
    def digest(self) -> str:
        """Names what is read and with which tokenizer."""
        tokenizer = self._tokenizer.build()
        return f"{self.text.digest(tokenizer)} {tokenizer.digest}"

    def restart(self) -> None:
        """Go back to where the lanes began."""
        self._open = {}

    def places(self, lanes: Sequence[int]) -> dict[int, Place]:
        """Where the next sequence of each of some lanes begins."""
        return {lane: self._lane(lane).place() for lane in lanes}

    def read(self, samples: np.ndarray) -> Sequences:
        """The next sequence of each lane in `samples`, [n] int64, in this order.

        Raises:
            DataError: a file is damaged, or no longer there.
        """
        cuts = [self._lane(lane).next(self.max_tokens) for lane in samples.tolist()]
        tokens = np.stack([cut.ids for cut in cuts]).astype(np.int64)
        missing = np.zeros((len(cuts), self.max_tokens), dtype=np.bool_)
        for row, cut in zip(missing, cuts, strict=True):
            if cut.targets is not None:
                row |= ~cut.targets[1:]
        extra: dict[str, np.ndarray] = {}
        if self.mask_boundaries:
            length = self.max_tokens + 1
            ends = [row * length + end for row, cut in enumerate(cuts) for end in cut.ends]
            starts = np.arange(len(cuts)) * length
            last, found = documents_of_rows(np.asarray(ends, dtype=np.int64), starts, self.max_tokens)
            missing[last] = True
            extra = found if self.mask_documents else {}
        rows, columns = np.nonzero(missing)
        return Sequences(tokens, (rows, columns), extra)

    def _lane(self, lane: int) -> _Lane:
        if lane not in self._open:
            opened = _Lane(self.text, self._tokenizer.build(), self._seed, lane, self.lanes)
            opened.start(self._places.get(lane, Place()))
            self._open[lane] = opened
        return self._open[lane]
