"""The number of sequences of each step of a run while its batch grows. Imports no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from msgspec import structs

from forge_data.config import DataConfig

T = TypeVar("T")


class BatchSizes:
    """A pure function of the step, so that there is nothing to save.

    Data are read in items of `unit` sequences, and a step takes as many items as it needs: the samples of a
    run are those of one stream, in its order, however they are cut into steps.

    Args:
        stages: pairs of steps and sequences a step, at the start of the run.
        last: sequences a step after them.
    """

    def __init__(self, stages: Sequence[tuple[int, int]], last: int) -> None:
        self._stages, self._last = list(stages), last
        self.unit = math.gcd(*self.all())

    def all(self) -> list[int]:
        """The global batches of all stages, in their order."""
        return [batch for _, batch in self._stages] + [self._last]

    def at(self, step: int) -> int:
        """Sequences of a step, from 0."""
        for steps, batch in self._stages:
            if step < steps:
                return batch
            step -= steps
        return self._last

    def samples(self, steps: int) -> int:
        """Sequences of the first so many steps."""
        total = 0
        for length, batch in self._stages:
            total += min(steps, length) * batch
            steps = max(0, steps - length)
        return total + steps * self._last

    def items(self, steps: int) -> int:
        """Items of the first so many steps."""
        return self.samples(steps) // self.unit

    def whole_steps(self, items: int) -> int:
        """Return the number of whole steps that `items` items suffice for."""
        left, steps = items * self.unit, 0
        for length, batch in self._stages:
            if left < length * batch:
                return steps + left // batch
            left, steps = left - length * batch, steps + length
        return steps + left // self._last

    def of_steps(self, items: Iterable[Sequence[T]], step: int) -> Iterator[list[T]]:
        """Yield the items of each step together, from a step on."""
        endless = iter(items)
        for at in itertools.count(step):
            count = self.at(at) // self.unit
            yield [part for item in itertools.islice(endless, count) for part in item]

    def counted_in_items(self, data: DataConfig) -> DataConfig:
        """Return the data section with skipped steps counted in items."""
        skips = [
            skip
            if skip.start_step is None or skip.end_step is None
            else structs.replace(
                skip, start_step=self.items(skip.start_step), end_step=self.items(skip.end_step)
            )
            for skip in data.skip
        ]
        return structs.replace(data, skip=skips)
