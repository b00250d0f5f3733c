"""Text that is streamed: the documents of a lane are laid end to end and cut into sequences of T tokens."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from forge_data.order.order import key
from forge_data.packing.concat import documents as documents_of_rows
from forge_data.packing.packing import Sequences, TextPacking
from forge_data.packing.stream import Lane, Place, Stream, Streamed
from forge_data.sources.columns import Columns, Document, named
from forge_data.sources.documents import Task, documents, were_text
from forge_data.sources.items import ItemReader
from forge_data.tokenizer.encoding import encoded
from forge_data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, file_digest

if TYPE_CHECKING:
    from forge_data.config import DataConfig

VERSION = 1
"""Another number when the same files and seed would give another order."""


@dataclass(frozen=True, kw_only=True)
class StreamedText(Streamed):
    """Documents of text.

    Attributes:
        columns: the parts of a row that make a document.
    """

    columns: Columns

    def digest(self, tokenizer: Tokenizer) -> str:
        """Return the digest of the files and columns that are read."""
        local = [task.path for task in self.tasks if isinstance(task.path, Path)]
        rows = ["rows"] * any(were_text(path) for path in local)
        return f"{key(VERSION, named(self.columns, tokenizer), *self.key_of_parts(), *rows):016x}"

    def stream(
        self,
        data: DataConfig,
        items: ItemReader | None,
        lanes: int,
        seed: int,
        places: Mapping[int, Place] | None = None,
    ) -> TextStream:
        """See `Streamed.stream`."""
        flags = data.mask_documents, data.mask_boundaries
        return TextStream(self, data.tokenizer, lanes, seed, data.max_tokens, *flags, places)


class _Document(NamedTuple):
    place: Place
    ids: np.ndarray
    targets: np.ndarray | None


class _Cut(NamedTuple):
    """A sequence: [T + 1] ids, [T + 1] bool whether each is a target, and the ends of documents in it."""

    ids: np.ndarray
    targets: np.ndarray | None
    ends: list[int]


class _Lane(Lane[Document]):
    """A lane that encodes documents when their tokens are needed."""

    def __init__(self, text: StreamedText, encoder: Tokenizer, seed: int, lane: int, lanes: int) -> None:
        super().__init__(text, seed, lane, lanes)
        self._text, self._encoder = text, encoder
        self._waiting: deque[_Document] = deque()

    def start(self, place: Place) -> None:
        """See `Lane.start`."""
        self._start = place
        self._waiting.clear()
        self._source = self.documents(place)
        self._skip = place.token

    def place(self) -> Place:
        """See `Lane.place`."""
        if not self._waiting:
            return self._start
        return self._waiting[0].place._replace(token=self._skip)

    def next(self, max_tokens: int) -> _Cut:
        """Return the next sequence; its last token is the first of the following one."""
        length = max_tokens + 1
        num_ids = sum(len(one.ids) for one in self._waiting) - self._skip
        while num_ids < length:
            place, document = next(self._source)
            self._waiting.append(
                _Document(place, *encoded(self._encoder, document, self._text.columns.masks))
            )
            num_ids += len(self._waiting[-1].ids)
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

    def read(self, task: Task) -> list[Document]:
        """See `Lane.read`."""
        found = documents(task, self._text.columns, self._encoder)
        return [document for _, document in found if document.text]

    def is_of_use(self, document: Document) -> bool:
        """See `Lane.is_of_use`. None: the whole text is a target; an empty target is the end token."""
        return document.targets != ()


class TextStream(Stream, TextPacking):
    """A stream of text.

    Args:
        text: the contents.
        tokenizer: encodes the text.
        lanes: number of lanes.
        seed: seed of the order.
        max_tokens: T.
        mask_documents: keep attention and targets within documents.
        mask_boundaries: keep targets within documents.
        places: the places of lanes; a lane without one begins at the start of the stream.
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
        super().__init__(text, lanes, places)
        self._text, self.max_tokens = text, max_tokens
        self.mask_documents, self.mask_boundaries = mask_documents, mask_documents or mask_boundaries
        self._tokenizer, self._seed = tokenizer, seed

    @property
    def digest(self) -> str:
        """Digest of the contents and the tokenizer, however the tokenizer's file is saved."""
        tokenizer = self._tokenizer.build()
        return f"{self._text.digest(tokenizer)} {tokenizer.digest}"

    @property
    def file_digest(self) -> str:
        """See `Stream.file_digest`."""
        tokenizer = self._tokenizer.build()
        return f"{self._text.digest(tokenizer)} {file_digest(tokenizer)}"

    def new_lane(self, lane: int) -> _Lane:
        """See `Stream.new_lane`."""
        return _Lane(self._text, self._tokenizer.build(), self._seed, lane, self.lanes)

    def read(self, samples: np.ndarray) -> Sequences:
        """Return the next sequence of each lane in `samples`, [n] int64, in this order.

        Raises:
            DataError: a file is damaged, or no longer there.
        """
        cuts = [self.lane(lane).next(self.max_tokens) for lane in samples.tolist()]
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
