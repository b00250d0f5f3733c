"""Samples of text and images laid into sequences, none ever cut. T tokens a sequence, rows of C = T + 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.order.order import key
from forge_data.packing.layouts import best_fit_rows
from forge_data.packing.packing import Packing, Ragged, Sequences
from forge_data.sources.items import ItemReader, Size

from forge_vlm.images.marks import PLACE as PLACE


class Sample(NamedTuple):
    """One sample.

    Attributes:
        tokens: [L] int64, `PLACE` where visual tokens stand; the last one ends it.
        targets: [L] bool, whether each token is to be predicted; a place never is.
        items: raw images and their sizes, in the order of their places.
        name: of the sample, for messages.
    """

    tokens: np.ndarray
    targets: np.ndarray
    items: Sequence[tuple[object, Size]]
    name: str = ""


class Samples(Protocol):
    """The samples of a source. It pickles small.

    Attributes:
        digest: names their content, what is made of it, and the tokenizer.
        lengths: [n] tokens of each, places too; known without any image.
    """

    digest: str
    lengths: np.ndarray

    def sizes(self, number: int) -> Sequence[Size]:
        """Of the images of one of them, which are not read."""
        ...

    def sample(self, number: int) -> Sample:
        """One of them.

        Raises:
            DataError: it is damaged.
        """
        ...


class SamplePacking(Packing):
    """Sequences of whole samples: in their order, as many as fit; where they fit best; or one each.

    Padding follows them.

    Args:
        samples: of the source.
        reader: of the model.
        data: the section `[data]`.
        eos_id: stands at places and in padding.

    Raises:
        DataError: a sample is longer than a sequence, or the section asks for what cannot be done.
    """

    def __init__(self, samples: Samples, reader: ItemReader, data: DataConfig, eos_id: int) -> None:
        if data.packing not in ("concat", "bestfit", "pad"):
            raise DataError(
                f'data.packing = "{data.packing}" for samples with images, which are never cut; use '
                '"concat", "bestfit" or "pad"'
            )
        if data.packing != "pad" and not data.mask_documents:
            raise DataError(
                f'data.packing = "{data.packing}" puts several samples into a sequence, which must not see '
                'each other; set data.mask_documents = true, or data.packing = "pad"'
            )
        self._made_of = samples, reader, data, eos_id
        self.max_tokens = data.max_tokens
        self._samples, self._reader, self._eos = samples, reader, eos_id
        self._masked = data.mask_documents
        self._order, self._starts = self._rows(samples.lengths, data.packing)
        self.digest = f"{key(samples.digest, reader.digest, data.packing):016x}"
        self.ragged, self.host = reader.ragged, reader.host
        self.sequence_bytes = self._sequence_bytes()

    def __reduce__(self) -> tuple[Any, ...]:
        return SamplePacking, self._made_of

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def extra(self) -> Mapping[str, np.ndarray]:
        """See `Packing.extra`: what a sequence of text has."""
        none = np.zeros(self.max_tokens, dtype=np.int64)
        documents = {"doc_ids": none, "positions": none} if self._masked else {}
        return self._reader.sequence(none, [], none) | documents

    def describe(self) -> str:
        """See `Packing.describe`."""
        used = int(self._samples.lengths.sum()) / (len(self) * (self.max_tokens + 1))
        return f"{len(self):,} sequences of {len(self._samples.lengths):,} samples, {1 - used:.1%} padding"

    def read(self, samples: np.ndarray) -> Sequences:
        """See `Packing.read`."""
        rows = [self._row(int(number)) for number in samples]
        tokens = np.stack([row.tokens for row in rows])
        ignored = np.nonzero(np.stack([~row.targets[1:] for row in rows]))
        extra = {name: np.stack([row.extra[name] for row in rows]) for name in rows[0].extra}
        ragged: dict[str, Ragged] = {}
        for name, none in self.ragged.items():
            parts = [[one[name] for one in row.arrays] for row in rows]
            counts = np.array([sum(map(len, part)) for part in parts], dtype=np.int64)
            ragged[name] = Ragged(np.concatenate([none, *(one for part in parts for one in part)]), counts)
        return Sequences(tokens, (ignored[0], ignored[1]), extra, ragged)

    def _rows(self, lengths: np.ndarray, packing: str) -> tuple[np.ndarray, np.ndarray]:
        """[samples] the samples in the order of their rows, and [rows + 1] where each row starts there."""
        room = self.max_tokens + 1
        if len(long := np.flatnonzero(lengths > room)):
            raise DataError(
                f"{len(long)} of {len(lengths)} samples are too long: sample {long[0]} has "
                f"{lengths[long[0]]} tokens, visual ones included, and a sequence has room for {room} "
                "(data.max_tokens + 1); samples are never cut: use longer sequences, or smaller images"
            )
        order = np.arange(len(lengths))
        if packing == "pad":
            return order, np.arange(len(lengths) + 1)
        limits = [(lengths, room), *self._beside()]
        if packing == "bestfit":
            row = best_fit_rows(np.max([-(-n * room // most) for n, most in limits], axis=0), room)
            order = np.argsort(row, kind="stable")
            return order, np.searchsorted(row[order], np.arange(row.max(initial=-1) + 2))
        starts, ends = [0], [(np.cumsum(n), most) for n, most in limits]
        while (at := starts[-1]) < len(lengths):
            fits = [np.searchsorted(n, (n[at - 1] if at else 0) + most, side="right") for n, most in ends]
            starts.append(int(min(fits)))
        return order, np.array(starts, dtype=np.int64)

    def _beside(self) -> list[tuple[np.ndarray, int]]:
        """[n] visual tokens of each sample, and most of a row: where they stand beside its tokens."""
        if not (most := getattr(self._reader, "tokens_beside", 0)):
            return []
        count: Callable[[Size], int] = self._reader.visual_tokens  # type: ignore[attr-defined]
        sizes = (self._samples.sizes(number) for number in range(len(self._samples.lengths)))
        visual = np.array([sum(map(count, one)) for one in sizes], dtype=np.int64)
        if len(large := np.flatnonzero(visual > most)):
            raise DataError(
                f"sample {large[0]} has {visual[large[0]]} visual tokens, and model.fusion.max_visual_tokens "
                f"= {most}; use a larger one, or fewer images in a sample"
            )
        return [(visual, most)]

    def _sequence_bytes(self) -> int:
        row = max((self._row(number) for number in range(min(4, len(self)))), key=lambda one: len(one.arrays))
        return sum(array.nbytes for item in row.arrays for array in item.values())

    def _row(self, number: int) -> _Row:
        room = self.max_tokens + 1
        row = _Row.empty(room, self._eos)
        at, places, sizes = 0, np.zeros(room, dtype=np.int64), list[Size]()
        prompt = np.zeros(room, dtype=bool)
        for nth, sample in enumerate(self._read(self._starts[number], self._starts[number + 1])):
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
        samples = np.where(np.arange(room) < at, row.doc_ids, -1)
        row.extra.update(self._reader.sequence(places[:-1], sizes, samples[:-1], prompt[:-1]))
        if self._masked:
            row.extra.update(doc_ids=row.doc_ids[:-1], positions=row.positions[:-1])
        return row

    def _read(self, first: np.int64, end: np.int64) -> Iterator[Sample]:
        for number in self._order[first:end].tolist():
            sample = self._samples.sample(number)
            needed = sum(
                part
                for _, size in sample.items
                for part in self._reader.layout(size)
                if isinstance(part, int)
            )
            if (found := int((sample.tokens == PLACE).sum())) != needed:
                raise DataError(
                    f"sample {sample.name or number} has {found} places for {len(sample.items)} images, "
                    f"which make {needed} visual tokens"
                )
            yield sample

    def _arrays(self, sample: Sample) -> Iterator[dict[str, np.ndarray]]:
        for number, (raw, size) in enumerate(sample.items):
            try:
                yield self._reader.read(raw, size)  # type: ignore[arg-type]
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
