"""Selects the checkpoints of a run for a command, and writes a table of the results for each."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from forge_ckpt.error import CheckpointError, DamagedError, UnreadableError
from forge_ckpt.store import Store
from forge_config import ConfigError

from forge_trainer.run_dir.files import RunFiles, write_whole
from forge_trainer.study.picture import Series, picture

Numbers = dict[str, Any]
T = TypeVar("T")


def chosen_steps(options: argparse.Namespace) -> list[int | None]:
    """Return the steps of `--step`, oldest first; None stands for the newest intact checkpoint.

    Raises:
        ConfigError: there is no run, or no such checkpoint; lists the checkpoints.
    """
    if (text := getattr(options, "step", None)) is None:
        return [None]
    files = RunFiles(Path(options.directory))
    if not files.config.exists():
        raise ConfigError(f"--step {text}: {options.directory} is no run, and has no steps; leave it out")
    saved_steps = Store(files.checkpoints).steps()
    low, _, high = text.partition("-")
    found = [step for step in saved_steps if text == "all" or int(low) <= step <= int(high or low)]
    if not found:
        listed = ", ".join(map(str, saved_steps)) or "none"
        raise ConfigError(f"--step {text}: {files.checkpoints} has no such checkpoint; there are {listed}")
    return list(found)


def of_each_step(options: argparse.Namespace, make: Callable[[int | None], T]) -> tuple[list[T], list[str]]:
    """Call a function for each step of `--step`; return its results, and why steps were skipped.

    Raises:
        CheckpointError, ConfigError: as `each_step`.
    """
    damaged = list[str]()
    return list(each_step(options, make, damaged)), damaged


def each_step(
    options: argparse.Namespace, make: Callable[[int | None], T], damaged: list[str]
) -> Iterator[T]:
    """Call a function for each step of `--step`; yield its results one after another.

    With several steps, damaged ones are skipped and added to `damaged`, so that the others are not lost.

    Raises:
        CheckpointError: the only step is damaged.
        ConfigError: as `chosen_steps`.
    """
    for step in chosen_steps(options):
        try:
            made = make(step)
        except (DamagedError, UnreadableError) as error:
            if not is_series(options):
                raise
            sys.stderr.write(f"step {step} is passed over: {error}\n")
            damaged.append(f"step {step}: {error}")
        else:
            yield made


def require_none(damaged: Sequence[str]) -> None:
    """Raise an error if steps were skipped.

    Raises:
        CheckpointError: steps were skipped; lists them.
    """
    if damaged:
        raise CheckpointError("\n".join(("checkpoints that cannot be read were passed over:", *damaged)))


def is_series(options: argparse.Namespace) -> bool:
    """Return whether `--step` may name several steps."""
    text = getattr(options, "step", None)
    return text is not None and not text.isdigit()


def folder_of(out: Path, step: int) -> Path:
    """Return the output folder of one of several steps."""
    return out / f"step-{step:08d}"


def flat(found: Numbers, prefix: str = "") -> dict[str, float]:
    """Flatten the numbers of nested tables; names are joined by slashes."""
    made: dict[str, float] = {}
    for key, value in found.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            made |= flat(value, f"{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            made[name] = value
    return made


def write_table(rows: Sequence[Numbers], path: Path | None) -> None:
    """Print one row for each step; with a path, also write CSV, and a picture of the losses beside it.

    Raises:
        ConfigError: the file cannot be written.
    """
    columns = _columns(rows)
    shown = [[_shown(row.get(column)) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *shown, strict=True)]
    for line in (columns, *shown):
        sys.stdout.write("  ".join(f"{cell:>{w}}" for cell, w in zip(line, widths, strict=True)) + "\n")
    if path is None:
        return
    lines = [column for column in columns if column.split("/")[-1] in ("loss", "acc,none")]
    series = [_series(rows, column) for column in lines or columns[1:2]]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, csv_of(rows))
        write_whole(path.with_suffix(".svg"), picture("By step", "step", "value", series, log_x=False))
    except OSError as error:
        raise ConfigError(f"--table {path} cannot be written: {error}") from None


def csv_of(rows: Sequence[Numbers]) -> str:
    """Format rows as CSV: the names of all columns, then one row for each step."""
    text = io.StringIO()
    table = csv.DictWriter(text, _columns(rows), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _columns(rows: Sequence[Numbers]) -> list[str]:
    return ["step", *dict.fromkeys(key for row in rows for key in row if key != "step")]


def _series(rows: Sequence[Numbers], column: str) -> Series:
    points = [(float(row["step"]), float(row[column])) for row in rows if column in row]
    return Series(column, points, points)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
