"""Sequences of complete samples as arrays. T tokens a sequence, rows of C = T + 1. Needs forge-data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.packing.packing import Ragged, Sequences
from forge_data.sources.items import ItemReader, Size

from forge_vlm.images.marks import PLACE


class Sample(NamedTuple):
    """One sample.

    Attributes:
        tokens: [L] int64, `PLACE` at places of visual tokens; the last token ends the sample.
        targets: [L] bool, whether each token is a target; a place never is.
        items: raw images and their sizes, in the order of their places.
        name: name of the sample, for messages.
    """

    tokens: np.ndarray
    targets: np.ndarray
    items: Sequence[tuple[object, Size]]
    name: str = ""


class SampleSequences:
    """Makes sequences of samples; padding follows them.

    Args:
        reader: image reader of the model.
        data: the section `[data]`.
        eos_id: id at image places and in padding.
    """

    def __init__(self, reader: ItemReader, data: DataConfig, eos_id: int) -> None:
        self.reader, self.room = reader, data.max_tokens + 1
        self._eos, self._masked = eos_id, data.mask_documents

    @property
    def extra(self) -> Mapping[str, np.ndarray]:
        """See `Packing.extra`: the inputs of a sequence of text."""
        none = np.zeros(self.room - 1, dtype=np.int64)
        documents = {"doc_ids": none, "positions": none} if self._masked else {}
        return self.reader.sequence(none, [], none) | documents

    def of(self, samples: Sequence[Sequence[Sample]]) -> Sequences:
        """Return one sequence for each list of samples, which must fit."""
        rows = [self._row(one) for one in samples]
        tokens = np.stack([row.tokens for row in rows])
        ignored = np.nonzero(np.stack([~row.targets[1:] for row in rows]))
        extra = {name: np.stack([row.extra[name] for row in rows]) for name in rows[0].extra}
        ragged: dict[str, Ragged] = {}
        for name, none in self.reader.ragged.items():
            parts = [[one[name] for one in row.arrays] for row in rows]
            counts = np.array([sum(map(len, part)) for part in parts], dtype=np.int64)
            ragged[name] = Ragged(np.concatenate([none, *(one for part in parts for one in part)]), counts)
        return Sequences(tokens, (ignored[0], ignored[1]), extra, ragged)

    def _row(self, samples: Sequence[Sample]) -> _Row:
        room = self.room
        row = _Row.empty(room, self._eos)
        at, places, sizes = 0, np.zeros(room, dtype=np.int64), list[Size]()
        prompt = np.zeros(room, dtype=bool)
        for nth, sample in enumerate(samples):
            self._require_places(sample)
            part = slice(at, at + len(sample.tokens))
            is_place = sample.tokens == PLACE
            row.tokens[part] = np.where(is_place, self._eos, sample.tokens)
            row.targets[part] = sample.targets & ~is_place
            row.targets[at] = False  # nothing before it belongs to it
            prompt[part] = np.logical_or.accumulate(row.targets[part]) == 0
            row.doc_ids[part], row.positions[part] = nth, np.arange(len(sample.tokens))
            places[part] = np.where(is_place, places.max() + is_place.cumsum(), 0)
            row.arrays.extend(self._arrays(sample))
            sizes += [size for _, size in sample.items]
            at = part.stop
        row.doc_ids[at:] = row.doc_ids[at - 1] + 1
        of_samples = np.where(np.arange(room) < at, row.doc_ids, -1)
        row.extra.update(self.reader.sequence(places[:-1], sizes, of_samples[:-1], prompt[:-1]))
        if self._masked:
            row.extra.update(doc_ids=row.doc_ids[:-1], positions=row.positions[:-1])
        return row

    def _require_places(self, sample: Sample) -> None:
        parts = [part for _, size in sample.items for part in self.reader.layout(size)]
        needed = sum(part for part in parts if isinstance(part, int))
        if (found := int((sample.tokens == PLACE).sum())) != needed:
            raise DataError(
                f"sample {sample.name} has {found} places for {len(sample.items)} images, which make "
                f"{needed} visual tokens"
            )

    def _arrays(self, sample: Sample) -> Iterator[dict[str, np.ndarray]]:
        for number, (raw, size) in enumerate(sample.items):
            try:
                yield self.reader.read(raw, size)  # type: ignore[arg-type]
            except ValueError as error:
                raise DataError(f"image {number + 1} of the sample {sample.name}: {error}") from None


class _Row(NamedTuple):
    tokens: np.ndarray
    targets: np.ndarray
    doc_ids: np.ndarray
    positions: np.ndarray
    arrays: list[dict[str, np.ndarray]]
    extra: dict[str, np.ndarray]

    @classmethod
    def empty(cls, room: int, eos: int) -> _Row:
        zeros = np.zeros(room, dtype=np.int64)
        return cls(np.full(room, eos, dtype=np.int64), zeros > 0, zeros.copy(), zeros.copy(), [], {})
