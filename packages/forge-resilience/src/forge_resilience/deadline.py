"""Whether the time of this process is running out."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from forge_resilience.verdict import Verdict

SAFETY = 1.5
"""A save may take this many times as long as the slowest one seen."""


class Deadline:
    """Asks to stop early enough that a last checkpoint can be written.

    Args:
        max_runtime_s: seconds that this process may run; None means no limit of its own.
        margin_s: least time kept for the last save.
        environ: where SLURM tells the end of the job (`SLURM_JOB_END_TIME`, seconds since 1970).
    """

    def __init__(
        self, max_runtime_s: float | None, margin_s: float, environ: Mapping[str, str] = os.environ
    ) -> None:
        left = [max_runtime_s] if max_runtime_s is not None else []
        if end := environ.get("SLURM_JOB_END_TIME"):
            left.append(float(end) - time.time())
        self._end_s = time.monotonic() + min(left) if left else None
        self._margin_s = margin_s

    def saved(self, seconds: float) -> None:
        """Learn how long a save takes."""
        self._margin_s = max(self._margin_s, SAFETY * seconds)

    def left_s(self) -> float:
        """Seconds until the end; infinite without a limit."""
        return float("inf") if self._end_s is None else self._end_s - time.monotonic()

    def verdict(self) -> Verdict:
        """STOP when no more than the margin is left."""
        return Verdict.STOP if self.left_s() <= self._margin_s else Verdict.CONTINUE
