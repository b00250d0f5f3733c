"""Finds comparable runs in a table: groups of rows that differ in one column only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

Row = dict[str, Any]
NOT_COMPARED = ("state", "step", "code", "reason", "run")


def complete(rows: Sequence[Row], loss: str) -> list[Row]:
    """Return the rows of complete runs with a finite loss."""
    return [
        row
        for row in rows
        if row["state"] == "complete" and isinstance(row.get(loss), int | float) and math.isfinite(row[loss])
    ]


def lowest(rows: Sequence[Row], loss: str, *keys: str) -> list[Row]:
    """Return the run of lowest loss for each value of the keys, over other choices such as learning rates."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in keys)
        if key not in found or row[loss] < found[key][loss]:
            found[key] = row
    return list(found.values())


def groups(rows: Sequence[Row], vary: str, *also: str) -> Iterator[tuple[Row, list[Row]]]:
    """Group rows that differ in nothing but `vary` and columns that follow from it.

    Args:
        rows: rows of the table.
        vary: the column that differs.
        also: columns that may differ with it.
    """
    columns = ("parameters", "tokens", "batch_tokens", "lr", "optimizer", "seed")
    fixed = [column for column in columns if column not in (vary, *also)]
    chosen = [key for key in dict.fromkeys(k for row in rows for k in row) if key.startswith("set.")]
    chosen = [key for key in chosen if _column(key) not in (vary, *also)]
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((*(row[c] for c in fixed), *(repr(row.get(k)) for k in chosen)), []).append(row)
    for members in found.values():
        if len({row[vary] for row in members}) > 1:
            yield {column: members[0][column] for column in fixed}, sorted(members, key=lambda r: r[vary])


def _column(key: str) -> str:
    """Return the column that corresponds to a key of a study; the key itself if there is none."""
    known = {
        "set.optimizer.lr": "lr",
        "set.job.seed": "seed",
        "set.train.global_batch": "batch_tokens",
        "set.optimizer.type": "optimizer",
        "set.optimizer.scale": "optimizer",
        "set.rules.lr.value": "lr",
        "set.rules.batch_tokens.value": "batch_tokens",
        "set.train.steps": "tokens",
    }
    return known.get(key, key)
