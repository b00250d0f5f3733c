"""Sources that are read while a run trains, without a store: shuffled, in lanes. T tokens a sequence.

The parts of all files are dealt to lanes. Each lane reads its parts window by window, in an order that is a
function of the seed, and shuffles the documents of a window; a subclass turns them into sequences. A place in
a lane is three integers, so that a checkpoint holds no data. The lanes are the same for any number of ranks:
each rank reads some of them, and a run continues with the same global batches on other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from forge_data.error import DataError
from forge_data.order.order import key, permute
from forge_data.packing.packing import Packing
from forge_data.sources.documents import Task
from forge_data.sources.items import ItemReader
from forge_data.sources.remote import patiently

if TYPE_CHECKING:
    from forge_data.config import DataConfig

ENDLESS = 1 << 40
"""How many sequences a stream is said to have: more than any run reads."""

MAX_LANES = 64
"""Lanes at most where nobody says how many: each holds the documents of a window."""

D = TypeVar("D")


class Place(NamedTuple):
    """Where the next sequence of a lane begins.

    Attributes:
        window: number of the window, counted over all passes.
        document: index in the shuffled order of the window.
        token: index within the document.
    """

    window: int = 0
    document: int = 0
    token: int = 0


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """The contents of a stream, and how they are dealt to lanes.

    Attributes:
        tasks: the parts of its files, each of which can be read alone.
        lanes: number of lanes; 0 lets the number of parts and the global batch decide.
        shuffle_parts: parts of a lane whose documents are shuffled together; 0 keeps the order of the files.
        pin: the commit of the files, if they come from the hub.
    """

    tasks: tuple[Task, ...]
    lanes: int = 0
    shuffle_parts: int = 2
    pin: str | None = None

    def key_of_parts(self) -> list[Any]:
        """Name the files by their names, sizes and parts, or commit, and how they are dealt."""
        parts = [(task.name, task.start, task.stop, task.bytes) for task in self.tasks]
        return [self.lanes, self.shuffle_parts, parts, *([] if self.pin is None else [self.pin])]

    def stream(
        self,
        data: DataConfig,
        items: ItemReader | None,
        lanes: int,
        seed: int,
        places: Mapping[int, Place] | None = None,
    ) -> Stream:
        """Return the sequences.

        Args:
            data: the section `[data]`.
            items: the reader of items such as images.
            lanes: number of lanes.
            seed: seed of the order.
            places: the places of lanes; a lane without one begins at the start of the stream.
        """
        raise NotImplementedError

    def num_lanes(self, global_batch: int) -> int:
        """Return the number of lanes: the configured one, or a divisor of the batch with four parts a lane.

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


class Lane(Generic[D]):
    """Reads every document of its parts once, then all of them again in another order, from a place on."""

    def __init__(self, source: Streamed, seed: int, lane: int, lanes: int) -> None:
        dealt = np.arange(len(source.tasks))
        if source.shuffle_parts:
            dealt = permute(dealt, len(dealt), key(seed, "parts"))
        self.tasks = [source.tasks[number] for number in dealt[lane::lanes]]
        self._shuffles = source.shuffle_parts > 0
        self._seed = key(seed, "lane", lane)
        self._together = max(1, source.shuffle_parts)

    def start(self, place: Place) -> None:
        """Go to a place."""
        raise NotImplementedError

    def place(self) -> Place:
        """Return where the next sequence begins."""
        raise NotImplementedError

    def read(self, task: Task) -> list[D]:
        """Return the documents of a part."""
        raise NotImplementedError

    def is_of_use(self, document: D) -> bool:
        """Whether a document has any target."""
        return True

    @property
    def windows(self) -> int:
        """The number of windows of a pass."""
        return -(-len(self.tasks) // self._together)

    def documents(self, place: Place) -> Iterator[tuple[Place, D]]:
        """Yield the documents from a place on, without end.

        Raises:
            DataError: a file is damaged or gone, or no document has a target.
        """
        window, first, empty = place.window, place.document, 0
        while True:
            found = self._window(*divmod(window, self.windows))
            empty = 0 if any(map(self.is_of_use, found)) else empty + 1
            if empty == self.windows:
                names = ", ".join(task.name for task in self.tasks[:3])
                raise DataError(
                    f"no document of {names}, which a lane of a stream reads, has a target: no text, or "
                    "no turn of the assistant (`roles`)"
                )
            order = np.arange(len(found))
            if self._shuffles:
                order = permute(order, len(found), key(self._seed, "documents", window))
            for number in range(first, len(found)):
                yield Place(window, number), found[int(order[number])]
            window, first = window + 1, 0

    def _window(self, epoch: int, window: int) -> list[D]:
        """Return the documents of a window in the order of its parts."""
        order = np.arange(len(self.tasks))
        if self._shuffles:
            order = permute(order, len(order), key(self._seed, "epoch", epoch))
        here = order[window * self._together : (window + 1) * self._together]
        return [document for number in here for document in self._read(self.tasks[int(number)])]

    def _read(self, task: Task) -> list[D]:
        try:
            return patiently(task.path, lambda: self.read(task))
        except DataError:
            raise
        except (OSError, ValueError) as error:
            raise DataError(
                f"{task.path} cannot be read: {error}; bring it back as it was when the run began"
            ) from error


class Stream(Packing):
    """A streamed source, as a packing. It is read in order: the sample is the lane to read from.

    Args:
        source: the contents.
        lanes: number of lanes.
        places: the places of lanes; a lane without one begins at the start of the stream.
    """

    @property
    def file_digest(self) -> str:
        """The digest with the bytes of the tokenizer's file, as earlier versions named runs."""
        return self.digest

    def __init__(self, source: Streamed, lanes: int, places: Mapping[int, Place] | None = None) -> None:
        self.source, self.lanes = source, lanes
        self._places = dict(places or {})
        self._open: dict[int, Any] = {}

    def new_lane(self, lane: int) -> Lane[Any]:
        """Return a lane that is not started."""
        raise NotImplementedError

    def __len__(self) -> int:
        return ENDLESS

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}

    def require_files(self) -> None:
        """See `Packing.require_files`: files are opened when they are read."""

    def describe(self) -> str:
        """See `Packing.describe`."""
        return f"streamed: {len(self.source.tasks):,} parts of files in {self.lanes} lanes"

    def restart(self) -> None:
        """Go back to the places where the lanes began."""
        self._open = {}

    def places(self, lanes: Sequence[int]) -> dict[int, Place]:
        """Return where the next sequence of each of some lanes begins."""
        return {lane: self.lane(lane).place() for lane in lanes}

    def lane(self, lane: int) -> Any:
        """Return a lane, from its place on."""
        if lane not in self._open:
            opened = self.new_lane(lane)
            opened.start(self._places.get(lane, Place()))
            self._open[lane] = opened
        return self._open[lane]
