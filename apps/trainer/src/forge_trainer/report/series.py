"""What a run has measured, as one series a name; read once, line by line. Imports no torch."""

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
"""Larger integers are no floats."""

PER_BUCKET = 4
"""Points that stay of a stretch of a series: the first, the least, the greatest and the last."""


@dataclass
class Series:
    """One number over the steps of a run; NaN where it was not finite.

    Attributes:
        steps: rising.
        values: as many.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Add a point; one of the same step takes the place of that before."""
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

    A line that is damaged or cut off is passed over. Where steps go back, because a run was continued from an
    earlier checkpoint, the later lines count, and those of the steps that were given up do not.

    Args:
        path: of the file.
        names: which to keep; None keeps all.
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
    """The places of points that show the same curve: no peak and no dip is lost, nor the first or last point.

    Args:
        values: of a series; NaN breaks the curve, and of each stretch one stays.
        most: so many points at most, 8 or more.
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
