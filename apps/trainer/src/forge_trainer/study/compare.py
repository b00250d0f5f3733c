"""Compares optimizers at equal tokens, at equal time, and at equal loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forge_trainer.study.config import AnalysisConfig
from forge_trainer.study.findings import Curve, Finding
from forge_trainer.study.picture import Series, picture
from forge_trainer.study.table import Row, groups, lowest

SMOOTH = 0.05
"""The fraction of a curve that a running mean covers."""


def optimizers(rows: Sequence[Row], how: AnalysisConfig, curve: Curve) -> Finding | None:
    """Compare the best setting of each optimizer, at each size and length, with the first optimizer's best.

    The loss of a setting is the mean over its seeds, because the best single run would have a lucky seed.

    Args:
        rows: rows of complete runs.
        how: analysis settings of the study.
        curve: returns tokens, seconds and training loss of a run, by its name.
    """
    made, series = Finding("optimizers", "Optimizers"), list[Series]()
    best = lowest(over_seeds(rows, how.loss), how.loss, "parameters", "tokens", "optimizer")
    made.numbers["pairs"] = []
    for size in dict.fromkeys((row["parameters"], row["tokens"]) for row in best):
        members = [row for row in best if (row["parameters"], row["tokens"]) == size]
        for other in members[1:]:
            made.numbers["pairs"].append(_pair(made, members[0], other, how, curve))
        for row in members if len(members) > 1 else ():
            smooth = smoothed(curve(row["run"]))
            series.append(Series(f"{row['optimizer']}, {size[0]:.2g}", line=[(t, y) for t, _, y in smooth]))
    if not made.numbers["pairs"]:
        return None
    for row in best:
        tried = {r["lr"] for r in rows if all(r[k] == row[k] for k in ("parameters", "tokens", "optimizer"))}
        if row["lr"] in (min(tried), max(tried)):
            made.doubts.append(
                f"{row['optimizer']}, {row['parameters']:.3g} parameters: its learning rate {row['lr']:g} is "
                f"at the edge of {len(tried)} that were tried; it may be better than it looks"
            )
    made.svg = picture("Training loss by optimizer", "tokens", "training loss", series)
    return made


def over_seeds(rows: Sequence[Row], loss: str) -> list[Row]:
    """Replace each run by the run of its setting nearest to the mean over seeds, with this mean as loss."""
    nearest = {id(row): row for row in rows}
    for _, members in groups(rows, "seed"):
        mean = float(np.mean([row[loss] for row in members]))
        chosen = min(members, key=lambda row: abs(row[loss] - mean)) | {loss: mean}
        nearest |= dict.fromkeys(map(id, members), chosen)
    return [nearest[id(row)] for row in rows]


def smoothed(points: Sequence[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """Return running means of the loss over previous points."""
    width = max(1, round(SMOOTH * len(points)))
    losses = [loss for _, _, loss in points]
    return [
        (tokens, seconds, float(np.mean(losses[max(0, k + 1 - width) : k + 1])))
        for k, (tokens, seconds, _) in enumerate(points)
    ]


Pair = dict[str, float | str | None]


def _pair(made: Finding, one: Row, other: Row, how: AnalysisConfig, curve: Curve) -> Pair:
    names = f"{other['optimizer']} against {one['optimizer']}, {one['parameters']:.3g} parameters"
    difference = other[how.loss] - one[how.loss]
    a, b = smoothed(curve(one["run"])), smoothed(curve(other["run"]))
    made.lines.append(f"{names}: {how.loss} {difference:+.4f} at {one['tokens']:.3g} tokens each")
    found: Pair = {"one": one["run"], "other": other["run"], "equal_tokens": difference}
    found |= {"equal_time": None, "to_equal_loss": None}
    if not a or not b:
        made.doubts.append(f"{names}: no metrics to compare by time, and to equal loss")
        return found
    seconds = min(a[-1][1], b[-1][1])
    by_time = _at(b, 1, seconds) - _at(a, 1, seconds)
    found["equal_time"] = by_time
    made.lines.append(f"{names}: training loss {by_time:+.4f} after {seconds:.3g} s of training each")
    reached = next((tokens for tokens, _, loss in b if loss <= a[-1][2]), None)
    if reached is None:
        made.lines.append(f"{names}: never reaches the loss that {one['optimizer']} ends at")
    else:
        found["to_equal_loss"] = reached / a[-1][0]
        made.lines.append(f"{names}: the loss it ends at after {reached / a[-1][0]:.3g} of its tokens")
    return found


def _at(points: Sequence[tuple[float, float, float]], axis: int, place: float) -> float:
    return float(np.interp(place, [p[axis] for p in points], [p[2] for p in points]))
