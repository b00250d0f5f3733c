"""Writes where the time of a run goes to `ledger.jsonl`, so that the times of all starts can be added."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from forge_resilience.deadline import process_age_s
from forge_resilience.goodput import Line, add_up, line_of

from forge_trainer.clock import BUILD, STEP, Clock
from forge_trainer.hooks.base import Hook
from forge_trainer.progress import Progress
from forge_trainer.run_dir.files import RunFiles, read_lines
from forge_trainer.steps.base import StepOutput

log = logging.getLogger(__name__)

LEAST_S, MOST_S, PART = 0.5, 60.0, 0.005
"""The longest time between lines: half a percent of the time so far, within bounds; a kill loses no more."""


def read_ledger(directory: Path) -> list[Line]:
    """Read all lines of a run; damaged lines are left out."""
    found = [line_of(entry) for entry in read_lines(RunFiles(directory).ledger, "stretch")]
    return [line for line in found if line is not None]


class Ledger(Hook):
    """The ledger of a run, on the first rank. A disk that cannot be written does not end the run.

    Args:
        directory: the run directory.
        clock: the clock of this process.
        progress: progress of the run.
        stop_s: returns the seconds that a stop with a checkpoint would take now.
    """

    span = "ledger"

    def __init__(
        self, directory: Path, clock: Clock, progress: Progress, stop_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._path, self._clock, self._stop_s = RunFiles(directory).ledger, clock, stop_s
        self._lines = read_ledger(directory)
        self._goodput = add_up(self._lines)
        self._stretch = self._lines[-1].stretch + 1 if self._lines else 0
        self._began = time.time() - process_age_s()
        self._from_step = self._step = progress.step
        self._before: dict[str, float] = {}
        self._now, self._spans = self._began, dict[str, float]()
        self._start_s: float | None = None
        self._first_step_s = 0.0
        self._appended_at = 0.0

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """See `Hook.on_step`."""
        self._look(progress.step)
        if self._start_s is None:  # what came before the loop, also before the clock was made
            self._start_s = max(0.0, self._now - self._began - sum(self._spans.values()))
        self._first_step_s = self._first_step_s or self._spans[STEP]
        if self._now - self._appended_at > min(MOST_S, max(LEAST_S, PART * self._goodput.wall_s)):
            self._append()

    def _look(self, step: int) -> None:
        self._now, self._step = time.time(), step
        spent = {name: s - self._before.get(name, 0.0) for name, s in self._clock.total_s.items()}
        self._spans = {name: s for name, s in spent.items() if s > 0 and name != BUILD}

    def _append(self, ended: bool = False) -> None:
        """Append the latest numbers to the ledger."""
        spans, steps = dict(self._spans), self._step - self._from_step
        if steps > 1:
            usual = (spans[STEP] - self._first_step_s) / (steps - 1)
            compiling = max(0.0, self._first_step_s - usual)
            spans |= {STEP: spans[STEP] - compiling, "compile": compiling}
        spans["start"] = self._start_s or 0.0
        stop_s = round(self._stop_s(), 3)
        line = Line(self._stretch, self._began, self._now, self._from_step, self._step, spans, ended, stop_s)
        self._appended_at = self._now
        self._lines.append(line)
        self._goodput = add_up(self._lines)
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(line)) + "\n")
        except OSError as error:
            log.warning("the ledger cannot be written: %s", error)

    @property
    def ratio(self) -> float:
        """The effective training time ratio of the run, up to the last line."""
        return self._goodput.ratio

    @property
    def mean_time_to_failure_s(self) -> float:
        """The mean time to failure of the run, up to the last line."""
        return self._goodput.mean_time_to_failure_s

    def rewind(self, progress: Progress) -> None:
        """See `Hook.rewind`. The time since the last step belongs to the new stretch."""
        self._append(ended=True)
        self._before = {n: s + self._before.get(n, 0.0) for n, s in self._spans.items()}
        self._stretch += 1
        self._began, self._from_step, self._step = self._now, progress.step, progress.step
        self._start_s, self._first_step_s = 0.0, 0.0

    def close(self) -> None:
        """See `Hook.close`."""
        if self._start_s is not None:
            self._look(self._step)
            self._append(ended=sys.exc_info()[0] is None)
