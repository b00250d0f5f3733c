"""Samples of text and images that are read during training, never cut. Needs forge-data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.order.order import key
from forge_data.packing.packing import Sequences
from forge_data.packing.stream import Lane, Place, Stream, Streamed
from forge_data.sources.documents import Task
from forge_data.sources.items import ItemReader
from forge_data.store.tokenize import Held
from forge_data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, file_digest

from forge_vlm.samples.make import NAMED, Damaged, Preparation, image_reader, sample_of
from forge_vlm.samples.rows import Image, InFile
from forge_vlm.samples.sequences import Sample, SampleSequences
from forge_vlm.samples.store import Prepared, read_file

LOOKED_AT = 64
"""Number of samples without any image after which the first lane reports it."""

Row = tuple[str, dict[str, Any], Path]
"""The name of a row, its columns, and the folder of its file."""


@dataclass(frozen=True, kw_only=True)
class StreamedSamples(Streamed):
    """Rows with images and text.

    Attributes:
        prepares: returns how rows become samples, for a tokenizer and the image reader of a model.
        version: version of the preparation; changes whenever the same rows would become other samples.
    """

    prepares: Callable[[TokenizerConfig, ItemReader, Held], Preparation]
    version: int

    def stream(
        self,
        data: DataConfig,
        items: ItemReader | None,
        lanes: int,
        seed: int,
        places: Mapping[int, Place] | None = None,
    ) -> SampleStream:
        """See `Streamed.stream`."""
        how = self.prepares(data.tokenizer, image_reader(items), Held())
        return SampleStream(self, how, data, lanes, seed, places)

    def digest(self, how: Preparation, tokenizer: Tokenizer, named: str) -> str:
        """Return the digest of the files read and of their preparation with the tokenizer `named`."""
        parts = how.named(tokenizer), how.reader.digest, named, *self.key_of_parts()
        return f"{key(self.version, *parts):016x}"


class SampleStream(Stream):
    """Sequences of complete samples in the order of their lane, as many as fit.

    Args:
        source: the rows to read.
        how: how rows become samples.
        data: the section `[data]`.
        lanes: number of lanes.
        seed: seed of the order.
        places: places where lanes begin; other lanes begin at the start of the stream.

    Raises:
        DataError: samples of a sequence would see each other.
    """

    def __init__(
        self,
        source: StreamedSamples,
        how: Preparation,
        data: DataConfig,
        lanes: int,
        seed: int,
        places: Mapping[int, Place] | None = None,
    ) -> None:
        if not data.mask_documents:
            raise DataError(
                "a stream of images puts several samples into a sequence, which must not see each other; set "
                "data.mask_documents = true"
            )
        super().__init__(source, lanes, places)
        self._how, self._seed, self.max_tokens = how, seed, data.max_tokens
        self._tokenizer = data.tokenizer.build()
        self._sequences = SampleSequences(how.reader, data, self._tokenizer.eos_id)
        self.digest = source.digest(how, self._tokenizer, self._tokenizer.digest)
        self._file_digest = source.digest(how, self._tokenizer, file_digest(self._tokenizer))
        self.ragged, self.host, self.extra = how.reader.ragged, how.reader.host, self._sequences.extra
        self.sequence_bytes = 1  # no more than a batch of a stream is read at once

    @property
    def file_digest(self) -> str:
        """See `Stream.file_digest`."""
        return self._file_digest

    def new_lane(self, lane: int) -> SampleLane:
        """See `Stream.new_lane`."""
        room = self.max_tokens + 1
        return SampleLane(self.source, self._how, self._tokenizer, room, self._seed, lane, self.lanes)

    def read(self, samples: np.ndarray) -> Sequences:
        """See `Packing.read`: the next sequence of each lane in `samples`."""
        return self._sequences.of([self.lane(lane).next() for lane in samples.tolist()])


class SampleLane(Lane[Row]):
    """Rows become samples when they are reached; a sample that does not fit begins the next sequence.

    Which samples are left out depends on the files only: among ranks with different data one rank reads a
    lane, and ranks with the same data find the same damage.
    """

    def __init__(
        self,
        source: Streamed,
        how: Preparation,
        tokenizer: Tokenizer,
        room: int,
        seed: int,
        lane: int,
        lanes: int,
    ) -> None:
        super().__init__(source, seed, lane, lanes)
        self._how, self._tokenizer, self._room, self._damaged = how, tokenizer, room, 0
        self._is_first = lane == 0  # the first lane reports findings about all lanes
        self._waiting: Prepared | None = None

    def start(self, place: Place) -> None:
        """See `Lane.start`."""
        self._place, self._waiting, self._samples = place, None, self._made(place)

    def place(self) -> Place:
        """See `Lane.place`."""
        return self._place

    def read(self, task: Task) -> list[Row]:
        """See `Lane.read`; does not read files of images."""
        folder = Path(str(task.path)).parent
        return [(name, row, folder) for name, row in self._how.rows(task, self._how.layout.names)]

    def next(self) -> list[Sample]:
        """Return the samples of the next sequence.

        Raises:
            DataError: a sample is too large for any sequence.
        """
        taken: list[Prepared] = []
        tokens, beside, most = 0, 0, self._how.reader.tokens_beside
        while True:
            sample = self._ahead()
            tokens, beside = tokens + len(sample.tokens), beside + self._beside(sample)
            if tokens > self._room or beside > most:
                break
            taken.append(sample)
            self._waiting, self._place = None, self._place._replace(document=self._place.document + 1)
        if not taken:
            what = f"{tokens} tokens, visual ones included, and a sequence has room for {self._room}"
            if beside > most:
                what = f"{beside} visual tokens, and model.fusion.max_visual_tokens = {most}"
            raise DataError(
                f"{sample.name} has {what}; samples are never cut: use longer sequences, or smaller images"
            )
        return [_whole(sample) for sample in taken]

    def _ahead(self) -> Prepared:
        """Return the next sample, that at `_place`."""
        if self._waiting is None:
            self._place, self._waiting = next(self._samples)
        return self._waiting

    def _beside(self, sample: Prepared) -> int:
        """Return the number of visual tokens of a sample if these are beside its tokens, otherwise 0."""
        reader = self._how.reader
        return sum(map(reader.visual_tokens, sample.sizes)) if reader.tokens_beside else 0

    def _made(self, place: Place) -> Iterator[tuple[Place, Prepared]]:
        """Yield samples and their places, from a place on, endlessly; rows without a sample are left out."""
        last, seen, has_images = place.window, 0, not self._is_first
        for at, (name, row, folder) in self.documents(place):
            if at.window > last + self.windows:
                raise DataError(
                    f"no row of {self.tasks[0].name} and the other files of its lane makes a sample: no "
                    "text, or damaged images alone"
                )
            try:
                sample = sample_of(name, row, folder, self._how, self._tokenizer)
            except Damaged as error:
                self._say(str(error))
                continue
            if sample is None:
                continue
            last, seen, has_images = at.window, seen + 1, has_images or bool(sample.images)
            if seen == LOOKED_AT and not has_images:
                column = self._how.layout.images
                sys.stderr.write(
                    f"none of the first {seen} samples has an image: nothing is in the column {column!r}\n"
                )
            yield at, sample

    def _say(self, damage: str) -> None:
        self._damaged += 1
        if self._damaged <= NAMED or self._damaged % 1000 == 0:
            count = f"{self._damaged:,} samples left out of this lane"
            sys.stderr.write(f"a sample with a damaged image is left out: {damage} ({count})\n")


def _whole(sample: Prepared) -> Sample:
    items = [(_bytes(image), size) for image, size in zip(sample.images, sample.sizes, strict=True)]
    return Sample(sample.tokens, sample.targets, items, sample.name)


def _bytes(image: Image) -> bytes:
    return read_file(image) if isinstance(image, InFile) else image
