"""`forge compare`: prints a table of runs, the best first; repetitions with other seeds share a row."""

from __future__ import annotations

import argparse
import csv
import difflib
import io
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_config import ConfigError
from forge_resilience.exit_codes import ExitCode

from forge_trainer.report.facts import SEEDS, config_of, differing, find_runs, names_of
from forge_trainer.report.scaled import scaled
from forge_trainer.report.series import Series, read_metrics
from forge_trainer.run_dir.files import RunFiles, write_whole

ALWAYS = ("optimizer.type", "optimizer.lr")
"""Keys that always have a column, even if all runs agree."""

VALIDATION, LOSS, SPEED, TOKENS = "eval/loss", "loss", "tokens_per_s", "tokens"

UNEVEN = 0.01
"""The largest relative difference in tokens at which losses are comparable; above it there is a note."""

WIDEST = 28
"""The most letters of a value in the terminal; the CSV has all."""


@dataclass(frozen=True)
class Measured:
    """The compared numbers of one run; None if not measured.

    Attributes:
        name: name of the run.
        config: its configuration by key.
        validation: loss of the last evaluation in nats a token; NaN if it was not finite.
        loss: mean of the last tenth of the finite training losses in the log; NaN if the last tenth of the
            log has no finite loss.
        tokens: tokens trained on at the last evaluation, or up to now if there is no evaluation.
        speed: median of the logged tokens a second.
    """

    name: str
    config: Mapping[str, Any]
    validation: float | None = None
    loss: float | None = None
    tokens: float | None = None
    speed: float | None = None


@dataclass
class Row:
    """Runs with equal values in all compared columns.

    Attributes:
        values: values of the keys in columns.
        runs: the runs, at least one.
    """

    values: Mapping[str, Any]
    runs: list[Measured] = field(default_factory=list)

    def numbers(self, name: str) -> list[float]:
        """Return a number of all runs that have it."""
        return [value for run in self.runs if (value := getattr(run, name)) is not None]

    def mean(self, name: str) -> float | None:
        """Return the mean of a number over the runs that have it."""
        found = self.numbers(name)
        return statistics.fmean(found) if found else None

    def deviation(self, name: str) -> float | None:
        """Return the sample standard deviation of a number; None for fewer than two runs."""
        found = self.numbers(name)
        return statistics.stdev(found) if len(found) > 1 else None


def compare_runs(options: argparse.Namespace) -> int:
    """Run `forge compare`.

    Raises:
        ConfigError: a folder is no run, no run has a key, or the CSV cannot be written.
    """
    paths = find_runs([Path(one) for one in options.runs])
    runs = [measured(name, path) for name, path in zip(names_of(paths), paths, strict=True)]
    by = [key for key in (options.by or "").split(",") if key]
    keys = columns(runs, by)
    rows = grouped(runs, keys)
    if options.csv:
        try:
            write_whole(Path(options.csv), as_csv(rows, keys))
        except OSError as error:
            raise ConfigError(f"{options.csv} cannot be written: {error}; name another file") from None
    sys.stdout.write("\n".join(as_text(rows, keys)) + "\n")
    return ExitCode.DONE


def measured(name: str, run: Path) -> Measured:
    """Read the compared numbers of a run.

    Raises:
        ConfigError: its configuration cannot be read.
    """
    metrics = read_metrics(RunFiles(run).metrics, {VALIDATION, LOSS, SPEED, TOKENS})
    evaluations = metrics.get(VALIDATION)
    evaluated = None if evaluations is None else (evaluations.steps[-1], evaluations.values[-1])
    speeds = _finite(metrics.get(SPEED))
    return Measured(
        name,
        config_of(run),
        validation=None if evaluated is None else evaluated[1],
        loss=_last_tenth(metrics.get(LOSS)),
        tokens=_tokens_at(metrics.get(TOKENS), None if evaluated is None else evaluated[0]),
        speed=statistics.median(speeds) if speeds else None,
    )


def _last_tenth(series: Series | None) -> float | None:
    if series is None:
        return None
    if not any(map(math.isfinite, series.values[-max(1, len(series.values) // 10) :])):
        return math.nan
    losses = _finite(series)
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])


def _finite(series: Series | None) -> list[float]:
    return [] if series is None else [value for value in series.values if math.isfinite(value)]


def _tokens_at(tokens: Series | None, step: int | None) -> float | None:
    if tokens is None:
        return None
    if step is None:
        return tokens.values[-1]
    return next((v for s, v in zip(tokens.steps, tokens.values, strict=True) if s >= step), tokens.values[-1])


def columns(runs: Sequence[Measured], by: Sequence[str]) -> list[str]:
    """Return the keys with a column: the keys of `by`, else `ALWAYS` and all that differ except seeds.

    Raises:
        ConfigError: no run has a key of `by`.
    """
    known = {key for run in runs for key in run.config}
    for key in by:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), 3)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise ConfigError(f"--by {key}: no run has this key{hint}; keys are those of config.toml")
    if by:
        return list(by)
    differ = differing([run.config for run in runs])
    return [
        *(key for key in ALWAYS if key in known),
        *(key for key in differ if key not in (*ALWAYS, *SEEDS)),
    ]


def grouped(runs: Sequence[Measured], keys: Sequence[str]) -> list[Row]:
    """Group runs that agree in `keys` into rows; the least validation loss first, unknown losses last.

    Losses that are not finite come before unknown losses.
    """
    rows: dict[str, Row] = {}
    for run in runs:
        row = rows.setdefault(repr(values := {key: run.config.get(key) for key in keys}), Row(values))
        row.runs.append(run)

    def rank(value: float | None) -> tuple[int, float]:
        return (2, 0.0) if value is None else (0, value) if math.isfinite(value) else (1, 0.0)

    def order(row: Row) -> tuple[tuple[int, float], tuple[int, float]]:
        return rank(row.mean("validation")), rank(row.mean("loss"))

    return sorted(rows.values(), key=order)


def as_text(rows: Sequence[Row], keys: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the table for the terminal, with notes on its limits."""
    several = any(len(row.runs) > 1 for row in rows)
    head = ["runs", *(["n"] if several else []), "validation", "loss", "tokens", "tokens/s", *_short(keys)]
    table = [head]
    for row in rows:
        name = row.runs[0].name + (f" and {len(row.runs) - 1} more" if len(row.runs) > 1 else "")
        table.append(
            [
                name,
                *([str(len(row.runs))] if several else []),
                _with_deviation(row, "validation"),
                _with_deviation(row, "loss"),
                "-" if (tokens := row.mean("tokens")) is None else scaled(tokens).strip(),
                "-" if (speed := row.mean("speed")) is None else f"{speed:,.0f}",
                *(_value(row, key) for key in keys),
            ]
        )
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    for line in table:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
    for row in rows:
        if 0 < (count := len(row.numbers("validation"))) < len(row.runs):
            yield f"{row.runs[0].name}: the validation loss is that of {count} of {len(row.runs)} runs"
    counts = [tokens for row in rows for tokens in row.numbers("tokens")]
    if counts and max(counts) > min(counts) * (1 + UNEVEN):
        yield (
            f"losses are of {scaled(min(counts)).strip()} to {scaled(max(counts)).strip()} tokens: those "
            "after different numbers of tokens do not compare"
        )


def _short(keys: Sequence[str]) -> list[str]:
    """Shorten keys to as many of their last parts as make them distinct."""
    found = []
    for key in keys:
        parts = key.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[-depth:])
            if sum(other == name or other.endswith(f".{name}") for other in keys) == 1:
                break
        found.append({"optimizer.type": "optimizer", "optimizer.lr": "lr"}.get(key, name))
    return found


def _with_deviation(row: Row, name: str) -> str:
    mean, deviation = row.mean(name), row.deviation(name)
    if mean is None:
        return "-"
    return f"{mean:.4f}" + ("" if deviation is None else f" ± {deviation:.4f}")


def _value(row: Row, key: str) -> str:
    value = row.values[key]
    text = "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"


def as_csv(rows: Sequence[Row], keys: Sequence[str]) -> str:
    """Return the table as CSV with all digits and names; unknown values are empty."""
    shown = ("validation", "loss", "tokens", "speed")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    of_shown = [f"{name}{part}" for name in shown for part in ("", "_deviation")]
    writer.writerow(["runs", "n", *of_shown, *keys])
    for row in rows:
        numbers = [value for name in shown for value in (row.mean(name), row.deviation(name))]
        values = [row.values.get(key) for key in keys]
        cells = [" ".join(run.name for run in row.runs), len(row.runs), *numbers, *values]
        writer.writerow(["" if cell is None else cell for cell in cells])
    return text.getvalue()
