"""A source of somebody's own, as in another package: workers import it by this name."""

import numpy as np
from forge_data.packing.packing import Packing, Ragged, Sequences
from forge_data.sources.config import Opening, SourceConfig, sources


def num_dots(sample: int) -> int:
    return (sample * 7) % 5 % 4


def dots_of(first: int, sample: int) -> list[list[float]]:
    """Rows [num_dots, 2] that tell their sequence and their place in it."""
    return [[float(first + sample), float(row)] for row in range(num_dots(sample))]


class Dots(Packing):
    def __init__(self, size: int, first: int, max_tokens: int, digest: str) -> None:
        self.size, self.first, self.max_tokens, self.digest = size, first, max_tokens, digest
        self.extra = {"num_dots": np.zeros((), np.int64), "marks": np.full(max_tokens, -1, np.int32)}
        self.ragged = {"dots": np.empty((0, 2), np.float32)}
        self.sequence_bytes = 3 * 8
        self.host = frozenset({"num_dots"})

    def __len__(self) -> int:
        return self.size

    def read(self, samples: np.ndarray) -> Sequences:
        each = samples.tolist()
        rows = [row for sample in each for row in dots_of(self.first, sample)]
        counts = np.asarray([num_dots(sample) for sample in each], np.int64)
        marks = np.repeat(samples[:, None], self.max_tokens, 1).astype(np.int32)
        values = np.asarray(rows, np.float32).reshape(-1, 2)
        tokens = self.first + samples[:, None] + np.zeros(self.max_tokens + 1, np.int64)
        return Sequences(
            tokens, extra={"num_dots": counts, "marks": marks}, ragged={"dots": Ragged(values, counts)}
        )


@sources.register("dots")
class DotsConfig(SourceConfig):
    size: int
    first: int = 0
    held: int = 0

    def has_validation(self) -> bool:
        return self.held > 0

    def packing(self, opening: Opening) -> Packing:
        size = self.size if opening.split == "train" else self.held
        items = "" if opening.items is None else opening.items.digest
        return Dots(size, self.first, opening.data.max_tokens, f"{opening.split} {size} {self.first} {items}")


class MaskedDots(Dots):
    """The same with documents, as `mask_documents` asks: each sequence is one."""

    def __init__(self, size: int, first: int, max_tokens: int, digest: str) -> None:
        super().__init__(size, first, max_tokens, digest)
        zeros = np.zeros(max_tokens, np.int64)
        self.extra |= {"doc_ids": zeros, "positions": zeros}

    def read(self, samples: np.ndarray) -> Sequences:
        found = super().read(samples)
        rising = np.repeat(np.arange(self.max_tokens)[None], len(samples), 0)
        return found._replace(extra={**found.extra, "doc_ids": rising * 0, "positions": rising})


@sources.register("masked-dots")
class MaskedConfig(DotsConfig):
    def packing(self, opening: Opening) -> Packing:
        size = self.size if opening.split == "train" else self.held
        return MaskedDots(size, self.first, opening.data.max_tokens, f"{opening.split} {size}")
