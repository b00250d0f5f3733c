"""Reads the metrics of a run as one series for each name, line by line. Imports no torch."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

NOT_MEASURED = {"step"}
"""Keys of a record that are no series."""

LARGEST = 10**308
"""Larger integers cannot be converted to floats."""

PER_BUCKET = 4
"""Points that remain of a stretch of a series: the first, the least, the greatest and the last."""


@dataclass
class Series:
    """One number over the steps of a run; NaN if it was not finite.

    Attributes:
        steps: steps, rising.
        values: a value for each step.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Add a point; it replaces a previous point of the same step."""
        if value.__class__ is int and abs(value) > LARGEST:
            value = math.inf
        if self.steps and self.steps[-1] == step:
            self.values[-1] = value
            return
        self.steps.append(step)
        self.values.append(value)

    def cut(self, step: int) -> None:
        """Drop the values at this step and later."""
        keep = bisect_left(self.steps, step)
        del self.steps[keep:], self.values[keep:]

    @property
    def last(self) -> tuple[int, float] | None:
        """The last finite point."""
        for at in range(len(self.values) - 1, -1, -1):
            if math.isfinite(self.values[at]):
                return self.steps[at], self.values[at]
        return None


def read_metrics(path: Path, names: set[str] | None = None) -> dict[str, Series]:
    """Read all series of `metrics.jsonl`, or only `names`; empty if there is no such file.

    Damaged or incomplete lines are skipped. If steps go back, because the run continued from an earlier
    checkpoint, the later lines replace the lines of the discarded steps.

    Args:
        path: path of the file.
        names: names of the series to keep; None keeps all.
    """
    found: dict[str, Series] = {}
    reached = -1
    for record in _records(path):
        step = record.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or step.bit_length() > 63:
            continue
        if step < reached:
            for series in found.values():
                series.cut(step)
        reached = step
        for name, value in record.items():
            if name in NOT_MEASURED or (names is not None and name not in names):
                continue
            if value is None:
                value = math.nan
            elif value.__class__ is not float and value.__class__ is not int:
                continue
            series = found.get(name)
            if series is None:
                series = found[name] = Series()
            series.add(step, value)
    return {name: series for name, series in found.items() if len(series.steps)}


def _records(path: Path) -> Iterator[dict[str, Any]]:
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    try:
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written
                try:
                    yield decode(line)
                except (ValueError, RecursionError):
                    continue
    except OSError:
        return


def thinned(values: Sequence[float], most: int) -> list[int]:
    """Select points that show the same curve: all peaks and dips remain, and the first and last point.

    Args:
        values: values of a series; NaN breaks the curve, and one NaN remains of each stretch.
        most: largest number of points, 8 or more.
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    buckets = most // (PER_BUCKET + 1)
    kept: list[int] = []
    for bucket in range(buckets):
        begin, end = count * bucket // buckets, count * (bucket + 1) // buckets
        part = values[begin:end]
        total = sum(part)
        places = {begin, end - 1}
        if math.isfinite(total):
            places |= {begin + part.index(min(part)), begin + part.index(max(part))}
        else:
            finite = [at for at in range(begin, end) if math.isfinite(values[at])]
            if finite:
                places |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
            places |= set([at for at in range(begin, end) if not math.isfinite(values[at])][:1])
        kept.extend(sorted(places))
    return kept
