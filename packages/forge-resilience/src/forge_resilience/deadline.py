"""Whether the time of this process is running out."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from forge_resilience.verdict import Verdict

log = logging.getLogger(__name__)

SAVE = "save"
"""The kind of span that the last one of a run is: writing a checkpoint."""

SAFETY = 1.5
"""A save may take this many times as long as the slowest one seen."""

RECENT = 200
"""Spans of a kind that are remembered: a first step that compiles counts for a while, not for good."""

_IMPORTED_S = time.monotonic()


class Deadline:
    """Asks to stop early enough that a last checkpoint can be written.

    The time until the next verdict is learnt: the longest recent span of each kind (a step, each hook) must
    fit, and a save after it.

    Args:
        max_runtime_s: seconds that this process may run, from its start on; None means no limit of its own.
        margin_s: least time kept for the last save.
        environ: has the end of the SLURM job (`SLURM_JOB_END_TIME`, seconds since 1970), if any.
        age_s: seconds that this process has run; by default as the system reports.
    """

    def __init__(
        self,
        max_runtime_s: float | None,
        margin_s: float,
        environ: Mapping[str, str] = os.environ,
        age_s: float | None = None,
    ) -> None:
        left = [math.inf, _slurm_left_s(environ)]
        if max_runtime_s is not None:
            left.append(max_runtime_s - (process_age_s() if age_s is None else age_s))
        self._end_s = time.monotonic() + min(left)
        self._margin_s = margin_s
        self._recent: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))

    def observe(self, kind: str, seconds: float) -> None:
        """Learn the duration of a span that recurs between two verdicts, or of a save.

        Args:
            kind: `SAVE`, or any name; spans of different kinds must not overlap.
            seconds: its duration.
        """
        self._recent[kind].append(seconds)

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Measure the duration of the block."""
        start = time.monotonic()
        yield
        self.observe(kind, time.monotonic() - start)

    def left_s(self) -> float:
        """Return the seconds until the end; infinite without a limit."""
        return self._end_s - time.monotonic()

    def needed_s(self, save_due: bool = False) -> float:
        """Return the seconds needed to go on until the next verdict and then save.

        Args:
            save_due: another save comes before that verdict.
        """
        longest = {kind: max(seconds) for kind, seconds in self._recent.items()}
        save_s = longest.pop(SAVE, 0.0)
        return sum(longest.values()) + save_due * save_s + max(self._margin_s, SAFETY * save_s)

    def verdict(self, save_due: bool = False) -> Verdict:
        """Return STOP when the remaining time is just enough to save.

        Args:
            save_due: a save follows this verdict in any case.
        """
        return Verdict.STOP if self.left_s() <= self.needed_s(save_due) else Verdict.CONTINUE


def process_age_s() -> float:
    """Seconds since this process started, the interpreter included.

    Read from /proc; on systems without it, since this module was imported.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started_s, 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _IMPORTED_S


def _slurm_left_s(environ: Mapping[str, str]) -> float:
    """Return the seconds until SLURM ends the job; infinite outside of SLURM and where that is unknown."""
    text = environ.get("SLURM_JOB_END_TIME")
    if text is None:
        return math.inf
    try:
        end = float(text)
    except ValueError:
        end = math.nan
    if not (math.isfinite(end) and end > 0):
        log.warning("SLURM_JOB_END_TIME is %r, no time in seconds: the end of the job is not respected", text)
        return math.inf
    return end - time.time()
