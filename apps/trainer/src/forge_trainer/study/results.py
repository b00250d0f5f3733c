"""Writes the results of a study as CSV and parquet, one row for each run. Imports no torch."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from forge_config.registry import type_name

from forge_trainer.run_dir.files import RunFiles, read_lines, write_whole
from forge_trainer.study.points import Point
from forge_trainer.study.state import State

Row = dict[str, Any]
TAIL = 0.05
"""The fraction of logged steps at the end whose mean loss is `train_loss`."""


def row_of(point: Point, state: State, root: Path) -> Row:
    """Return a row of the results table: settings, state and losses of a run; None if unknown."""
    records = read_lines(RunFiles(root / point.name).metrics, "step")
    losses = [(r["step"], r["loss"]) for r in records if _is_number(r.get("loss"))]
    last = losses[-max(1, round(TAIL * len(losses))) :]
    final: Row = {}
    for record in records:
        if record["step"] >= point.job.train.steps:
            final |= {key: value for key, value in record.items() if key.startswith("eval/")}
    spent = time_of(records)
    known: Row = {
        "run": point.name,
        "state": state.kind,
        "step": state.step,
        "code": state.code,
        "reason": state.reason,
        **point.measures,
        "steps": point.job.train.steps,
        "optimizer": type_name(type(point.job.optimizer)),
        "lr": point.job.optimizer.lr,
        "seed": point.job.job.seed,
        "train_loss": sum(loss for _, loss in last) / len(last) if last else None,
        "seconds": spent if state.kind == "complete" else None,
        **final,
    }
    return known | {f"set.{key}": value for key, value in point.choice.items()}


def time_of(records: Sequence[Row]) -> float:
    """Return the seconds of training, from the means in the lines of metrics."""
    spent, before = 0.0, 0
    for record in records:
        if _is_number(seconds := record.get("time/training_s")):
            spent += seconds * max(0, record["step"] - before)
            before = record["step"]
    return spent


def curve_of(point: Point, root: Path) -> list[tuple[float, float, float]]:
    """Return tokens, seconds and training loss of each logged step."""
    found, spent, before = list[tuple[float, float, float]](), 0.0, 0
    for record in read_lines(RunFiles(root / point.name).metrics, "step"):
        seconds, loss = record.get("time/training_s"), record.get("loss")
        if _is_number(seconds) and _is_number(loss):
            spent += seconds * max(0, record["step"] - before)
            before = record["step"]
            found.append((float(record.get("tokens", 0)), spent, loss))
    return found


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def write_results(rows: Sequence[Row], root: Path) -> list[Path]:
    """Write `results.csv` and `results.parquet`; return both paths."""
    import pyarrow
    import pyarrow.parquet

    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    root.mkdir(parents=True, exist_ok=True)
    write_whole(root / "results.csv", text.getvalue())
    made = pyarrow.table({column: _column([row.get(column) for row in rows]) for column in columns})
    partial = root / ".results.parquet"
    pyarrow.parquet.write_table(made, partial)
    partial.replace(root / "results.parquet")
    return [root / "results.csv", root / "results.parquet"]


def _column(values: list[Any]) -> list[Any]:
    """Convert values to one type; to text if they are not all numbers."""
    present = [value for value in values if value is not None]
    if all(isinstance(value, int) and not isinstance(value, bool) for value in present):
        return values
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in present):
        return [None if value is None else float(value) for value in values]
    return [None if value is None else str(value) for value in values]
