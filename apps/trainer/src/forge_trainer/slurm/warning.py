"""Computes how long before the time limit SLURM warns a run, from the stops of its earlier starts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from forge_trainer.hooks.ledger import read_ledger
from forge_trainer.run_dir.files import RunFiles, read_lines
from forge_trainer.slurm.config import EARLY_S, UNMEASURED_S, ClusterConfig, seconds

SAFETY = 1.5
"""The safety factor on the slowest stop expected so far."""

LEAST_S, MOST_S = 60, 3600
"""The least and the most time of a warning before the limit; it never comes in the first half of a start."""

REMEMBERED = 20
"""The number of last starts of a run that count; before them it may have had a different size."""


@dataclass(frozen=True)
class WarningTime:
    """The time of SLURM's warning.

    Attributes:
        seconds: seconds before the time limit.
        origin: origin of the number, for a person.
    """

    seconds: int
    origin: str

    def __str__(self) -> str:
        return f"{self.seconds} s before the time limit ({self.origin})"


def warning_of(cluster: ClusterConfig, directories: Iterable[Path]) -> WarningTime:
    """Return the time of the warning: from the cluster file, else from earlier starts, else a default.

    Args:
        cluster: settings of the cluster.
        directories: directories of the run, or of all runs of a sweep.
    """
    if cluster.warning_s is not None:
        return WarningTime(cluster.warning_s, "warning_s of the cluster file")
    folders = list(directories)
    stops = [s for folder in folders for s in _stops_s(folder)]
    ends = [s for folder in folders for s in _ends_s(folder)]
    limit_s = seconds(cluster.time)
    most_s = MOST_S if limit_s is None else min(MOST_S, (limit_s - EARLY_S) // 2)
    if not stops:
        return WarningTime(min(UNMEASURED_S, most_s), "usual: no earlier start has measured how it stops")
    stop_s, end_s = max(stops), max(ends, default=0.0)
    needed_s = SAFETY * (stop_s + end_s)
    chosen_s = min(max(LEAST_S, math.ceil(needed_s)), most_s)
    many = f"{len(stops)} earlier start{'s' if len(stops) > 1 else ''}"
    origin = f"learned from {many}: {stop_s:.0f} s to a last checkpoint, {end_s:.0f} s to end, times {SAFETY}"
    if needed_s > most_s:
        origin += f"; bounded, {math.ceil(needed_s)} s are needed: ask for a longer time"
    return WarningTime(chosen_s, origin)


def _stops_s(directory: Path) -> list[float]:
    """Return the measured seconds that each of the last starts needed for a step, its hooks and a save."""
    last = {line.stretch: line.stop_s for line in read_ledger(directory)}
    return [s for s in list(last.values())[-REMEMBERED:] if 0 < s < math.inf]


def _ends_s(directory: Path) -> list[float]:
    """Return the seconds from the recorded end of each of the last starts to the end of its processes."""
    seconds = [line["shutdown_s"] for line in read_lines(RunFiles(directory).starts, "shutdown_s")]
    return [float(s) for s in seconds[-REMEMBERED:] if isinstance(s, int | float) and 0 <= s < math.inf]
