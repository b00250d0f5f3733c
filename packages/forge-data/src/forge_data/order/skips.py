"""Which samples of the order a run leaves out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np
from forge_config import Config, Meta


class SkipConfig(Config):
    """Steps or samples to skip; later ones move up.

    Attributes:
        start_step: the first step that is left out, counted as the run counts steps after all earlier skips.
        end_step: the first step that is read again.
        samples: instead of steps, global numbers of samples, as `forge-data sample` prints them.
    """

    start_step: Annotated[int, Meta(ge=0, le=1 << 40)] | None = None
    end_step: Annotated[int, Meta(ge=1, le=1 << 40)] | None = None
    samples: list[Annotated[int, Meta(ge=0, le=1 << 60)]] = []

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        steps = self.start_step is not None and self.end_step is not None and self.start_step < self.end_step
        if bool(self.samples) == steps or (self.start_step is None) != (self.end_step is None):
            yield (
                f"given start_step = {self.start_step}, end_step = {self.end_step}, samples = "
                f"{self.samples}; expected a start_step below an end_step, or samples"
            )

    def __str__(self) -> str:
        if self.start_step is not None and self.end_step is not None:
            return f"steps {self.start_step} to {self.end_step - 1}"
        listed = ", ".join(map(str, self.samples[:8]))
        return f"samples {listed}{', ...' if len(self.samples) > 8 else ''}"


def left_out(to: int, first: int, end: int, margin: int) -> SkipConfig:
    """Return the skip that follows a rollback.

    Args:
        to: the step that the run went back to.
        first: the first step of the trouble.
        end: the step after the last step of the trouble.
        margin: number of steps before and after the trouble that are left out as well.
    """
    return SkipConfig(start_step=max(to, first - margin), end_step=end + margin)


class Skips:
    """Map the position of a sample in the run to its global index.

    Args:
        intervals: global indices that are left out, each as (first, after the last).
    """

    def __init__(self, intervals: Sequence[tuple[int, int]] = ()) -> None:
        self.intervals: list[tuple[int, int]] = []
        for start, stop in sorted(intervals):
            if self.intervals and start <= self.intervals[-1][1]:
                start, stop = self.intervals[-1][0], max(stop, self.intervals.pop()[1])
            self.intervals.append((start, stop))
        starts, stops = np.asarray(self.intervals, dtype=np.int64).reshape(-1, 2).T
        self._before = np.concatenate([[0], np.cumsum(stops - starts)])
        self._places = starts - self._before[:-1]

    def ordinals(self, places: np.ndarray) -> np.ndarray:
        """[n] int64: the global index of each place in the run, [n] int64 from 0."""
        if not self.intervals:
            return places
        return places + self._before[np.searchsorted(self._places, places, side="right")]

    def ordinal(self, place: int) -> int:
        """The global index of one place."""
        return int(self.ordinals(np.asarray([place]))[0])

    def place(self, ordinal: int) -> int:
        """Return the number of samples that are read before a global index."""
        return ordinal - sum(min(stop, ordinal) - start for start, stop in self.intervals if start < ordinal)

    def first_place(self, interval: int) -> int:
        """Return the position in the run from which on an interval changes the order."""
        return int(self._places[interval])


def build_skips(configs: Sequence[SkipConfig], global_batch: int) -> Skips:
    """Build the skips of a configuration, for a run with `global_batch` sequences a step."""
    skips = Skips()
    for config in configs:
        added = [(sample, sample + 1) for sample in config.samples]
        if config.start_step is not None and config.end_step is not None:
            first, last = config.start_step * global_batch, config.end_step * global_batch - 1
            added.append((skips.ordinal(first), skips.ordinal(last) + 1))
        skips = Skips([*skips.intervals, *added])
    return skips
