"""Packing of samples of text and images, never cut. T tokens a sequence, rows of C = T + 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.order.order import key
from forge_data.packing.layouts import best_fit_rows
from forge_data.packing.packing import Packing, Sequences
from forge_data.sources.items import ItemReader, Size

from forge_vlm.samples.sequences import Sample, SampleSequences

LOOKED_AT = 256
"""Number of sequences from which the size of sequences of a source is estimated."""


class Samples(Protocol):
    """The samples of a source. It pickles small.

    Attributes:
        digest: names their content, their preparation, and the tokenizer.
        lengths: [n] number of tokens of each sample, with image places; known without reading images.
    """

    digest: str
    lengths: np.ndarray

    def sizes(self, number: int) -> Sequence[Size]:
        """Return the sizes of the images of a sample without reading them."""
        ...

    def sample(self, number: int) -> Sample:
        """Return a sample.

        Raises:
            DataError: it is damaged.
        """
        ...


class SamplePacking(Packing):
    """Sequences of complete samples: as many as fit in their order, by best fit, or one per sequence.

    Padding follows them.

    Args:
        samples: samples of the source.
        reader: image reader of the model.
        data: the section `[data]`.
        eos_id: id at image places and in padding.

    Raises:
        DataError: a sample is longer than a sequence, or `[data]` asks for something impossible.
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
        self._samples, self._reader = samples, reader
        self._sequences = SampleSequences(reader, data, eos_id)
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
        """See `Packing.extra`: the inputs of a sequence of text."""
        return self._sequences.extra

    def describe(self) -> str:
        """See `Packing.describe`."""
        used = int(self._samples.lengths.sum()) / (len(self) * (self.max_tokens + 1))
        return f"{len(self):,} sequences of {len(self._samples.lengths):,} samples, {1 - used:.1%} padding"

    def read(self, samples: np.ndarray) -> Sequences:
        """See `Packing.read`."""
        return self._sequences.of([self._row(int(number)) for number in samples])

    def token_counts(self, samples: np.ndarray) -> np.ndarray:
        """See `Packing.token_counts`; image places are no padding."""
        ends = np.concatenate([[0], np.cumsum(self._samples.lengths[self._order])])
        counts = ends[self._starts[samples + 1]] - ends[self._starts[samples]]
        return np.minimum(counts, self.max_tokens)

    def _rows(self, lengths: np.ndarray, packing: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples in the order of their rows, and the start of each row in it, [rows + 1]."""
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
        """Return the visual tokens [n] of samples and the most per row, if they are beside the tokens."""
        if not (most := self._reader.tokens_beside):
            return []
        sizes = (self._samples.sizes(number) for number in range(len(self._samples.lengths)))
        visual = np.array([sum(map(self._reader.visual_tokens, one)) for one in sizes], dtype=np.int64)
        if len(large := np.flatnonzero(visual > most)):
            raise DataError(
                f"sample {large[0]} has {visual[large[0]]} visual tokens, and model.fusion.max_visual_tokens "
                f"= {most}; use a larger one, or fewer images in a sample"
            )
        return [(visual, most)]

    def _sequence_bytes(self) -> int:
        """Return the size of the sequence with the largest images among some sequences."""
        spread = np.unique(np.linspace(0, len(self) - 1, LOOKED_AT).astype(np.int64))
        row = max(spread.tolist(), key=lambda number: sum(map(_pixels, self._sizes(number))))
        read = self._sequences.of([self._row(row)]).ragged.values()
        return max(1, sum(one.values.nbytes for one in read))

    def _sizes(self, row: int) -> list[Size]:
        return [size for number in self._numbers(row) for size in self._samples.sizes(number)]

    def _row(self, row: int) -> list[Sample]:
        return [self._samples.sample(number) for number in self._numbers(row)]

    def _numbers(self, row: int) -> list[int]:
        return self._order[self._starts[row] : self._starts[row + 1]].tolist()


def _pixels(size: Size) -> int:
    return size.frames * size.height * size.width
