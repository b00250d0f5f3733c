"""Where the wall time of a run went, over all of its starts; and how often to save. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

PRODUCTIVE = "step"
"""The span that counts as training."""

PRIOR_S = 8 * 3600.0
"""Until failures say otherwise, one is expected in this time."""


@dataclass(frozen=True)
class Line:
    """A snapshot of one stretch of a run: from a start or a rollback to the next.

    Attributes:
        stretch: its number.
        began: start of the stretch, in seconds since 1970.
        at: time of this snapshot.
        from_step: steps taken at the start of the stretch.
        step: steps taken by now.
        spans: seconds of the stretch in each named part; the rest is `other`.
        ended: whether it ended in order: by a signal, a time limit, a rollback, or its last step.
        stop_s: estimated duration of a stop at this time, with a last checkpoint; 0 if unknown.
    """

    stretch: int
    began: float
    at: float
    from_step: int
    step: int
    spans: Mapping[str, float]
    ended: bool = False
    stop_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """From its beginning to this look."""
        return self.at - self.began


@dataclass(frozen=True)
class Goodput:
    """The totals of a run; all seconds together are its wall time.

    Attributes:
        wall_s: from the first start to the last snapshot.
        seconds: by use, largest first: `productive`, `lost` (steps that were repeated), `down` (between two
            starts: noticed, queued, restarted), `start` (up to the first step), `compile` (time of the first
            step above that of others), and the spans of the run.
        starts: number of stretches.
        failures: number of stretches that broke off.
    """

    wall_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    starts: int = 0
    failures: int = 0

    @property
    def ratio(self) -> float:
        """Effective training time: the fraction of wall time in steps that counted. 0 to 1."""
        return self.seconds.get("productive", 0.0) / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def mean_time_to_failure_s(self) -> float:
        """Measured, with one failure in `PRIOR_S` to begin with."""
        up_s = self.wall_s - self.seconds.get("down", 0.0)
        return (up_s + PRIOR_S) / (self.failures + 1)


def add_up(lines: Iterable[Line]) -> Goodput:
    """The sum over all stretches, oldest first."""
    stretches: dict[int, list[Line]] = {}
    for line in lines:
        stretches.setdefault(line.stretch, []).append(line)
    ordered = [stretches[nth] for nth in sorted(stretches)]
    if not ordered:
        return Goodput()
    seconds: dict[str, float] = {}

    def add(name: str, amount: float) -> None:
        seconds[name] = seconds.get(name, 0.0) + amount

    for mine, after in pairwise([*ordered, None]):
        assert mine is not None
        last = mine[-1]
        productive = last.spans.get(PRODUCTIVE, 0.0)
        lost = productive - _productive_at(mine, after[0].from_step) if after else 0.0
        add("lost", lost)
        add("productive", productive - lost)
        for name, amount in last.spans.items():
            add(name, amount if name != PRODUCTIVE else 0.0)
        add("other", last.wall_s - sum(last.spans.values()))
        if after:
            add("down", after[0].began - last.at)
    seconds.pop(PRODUCTIVE, None)
    failures = sum(not one[-1].ended for one in ordered[:-1])
    ranked = dict(sorted(seconds.items(), key=lambda item: -item[1]))
    return Goodput(ordered[-1][-1].at - ordered[0][0].began, ranked, len(ordered), failures)


def _productive_at(stretch: Sequence[Line], step: int) -> float:
    """Return the productive seconds of a stretch up to a step, interpolated between two snapshots."""
    before_step, before_s = stretch[0].from_step, 0.0
    for line in stretch:
        now_s = line.spans.get(PRODUCTIVE, 0.0)
        if line.step >= step:
            share = (step - before_step) / max(1, line.step - before_step)
            return before_s + max(0.0, share) * (now_s - before_s)
        before_step, before_s = line.step, now_s
    return before_s


def save_every_s(stall_s: float, mean_time_to_failure_s: float) -> float:
    """Return the time between checkpoints that loses least to saving and to repeated steps.

    Source: Young 1974, doi:10.1145/361147.361115, the first order of Daly 2006,
    doi:10.1016/j.future.2004.11.016, eq. 20 for a stall far below the mean time to failure.

    Args:
        stall_s: how long training waits for a checkpoint.
        mean_time_to_failure_s: mean time between two failures.
    """
    if stall_s >= 2 * mean_time_to_failure_s:
        return mean_time_to_failure_s
    return math.sqrt(2 * stall_s * mean_time_to_failure_s)


def line_of(entry: Mapping[str, Any]) -> Line | None:
    """Parse a line of the ledger from JSON; None if it is none."""
    try:
        return Line(
            int(entry["stretch"]),
            float(entry["began"]),
            float(entry["at"]),
            int(entry["from_step"]),
            int(entry["step"]),
            {str(name): float(seconds) for name, seconds in entry["spans"].items()},
            entry["ended"] is True,
            float(entry.get("stop_s", 0.0)),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
