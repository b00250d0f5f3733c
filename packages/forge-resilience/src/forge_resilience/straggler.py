"""Which rank is slower than the others at the same work. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

SLOW = 0.8
"""A rank with a lower score is slow."""

WINDOWS = 3
"""So many windows in a row: one may be chance."""

SHARE = 0.05
"""What a rank loses to the fastest must be at least this part of a step, or it does not matter."""

PROBE = "probe"
"""The same fixed work on each rank: it tells slow hardware, and matters however short it is."""

SHARED = "step"
"""Ranks wait for one another in it: its time is that of the slowest on all of them, and gets no score."""


class Slow(NamedTuple):
    """A rank that was slow for `WINDOWS` windows.

    Attributes:
        rank: global rank.
        phase: the phase in which it was slow.
        score: the time of the fastest rank over its own, 0 to 1.
    """

    rank: int
    phase: str
    score: float


def scores(medians: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the time of the fastest rank over that of each rank, by phase; 1 is the fastest.

    Differences too small to matter to a step count as 1.

    Args:
        medians: for each rank, seconds by phase, the same phases on all of them.
    """
    step_s = min(sum(s for phase, s in mine.items() if phase != PROBE) for mine in medians)
    found: dict[str, list[float]] = {}
    for phase in medians[0]:
        if phase == SHARED:
            continue
        times = [mine[phase] for mine in medians]
        best = min(times)
        least = 0.0 if phase == PROBE else SHARE * step_s
        found[phase] = [best / own if own - best > least else 1.0 for own in times]
    return found


class Stragglers:
    """Compares window after window, and names a rank once when it has become slow."""

    def __init__(self) -> None:
        self._slow: Counter[tuple[int, str]] = Counter()

    def window(self, found: Mapping[str, Sequence[float]]) -> list[Slow]:
        """Return the ranks that have been slow for `WINDOWS` windows in a row with this one.

        Args:
            found: from `scores`.
        """
        named: list[Slow] = []
        for phase, ranks in found.items():
            for rank, score in enumerate(ranks):
                key = rank, phase
                self._slow[key] = self._slow[key] + 1 if score < SLOW else 0
                if self._slow[key] == WINDOWS:
                    named.append(Slow(rank, phase, score))
        return named
