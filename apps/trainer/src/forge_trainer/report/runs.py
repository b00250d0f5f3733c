"""Lists several runs, and makes the pictures and sums that `forge status` prints. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from forge_ckpt.lease import read_holder
from forge_ckpt.store import Store
from forge_config import ConfigError
from forge_resilience.goodput import Goodput

from forge_trainer.config.eval import losses_of
from forge_trainer.run_dir.files import RunFiles, parse_line, read_ended, read_outline, steps_of
from forge_trainer.track.console import duration

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60
TAIL_BYTES = 1 << 16
MORE_BYTES = 1 << 23
"""Bytes at the end of `metrics.jsonl` that the listing reads, so that it stays fast; `MORE_BYTES` if
`TAIL_BYTES` contain no evaluation."""


def runs_in(directory: Path) -> list[Path]:
    """Return the runs in a folder, by name; empty if the folder is a run itself."""
    if RunFiles(directory).config.exists() or not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if RunFiles(path).config.exists())


def listing(runs: Sequence[Path]) -> Iterator[str]:
    """Yield one line for each run: name, steps, training loss, validation loss, state."""
    rows = [("run", "step", "loss", "validation", "state"), *(_row(run) for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for name, step, loss, validation, state in rows:
        numbers = f"{step:>{widths[1]}}  {loss:>{widths[2]}}  {validation:>{widths[3]}}"
        yield f"{name:<{widths[0]}}  {numbers}  {state}"


def _row(run: Path) -> tuple[str, str, str, str, str]:
    try:
        until = read_outline(run).train.steps
    except ConfigError as error:
        return run.name, "", "", "", f"its config.toml cannot be used: {str(error).splitlines()[0]}"
    trained, evaluated = _last_records(RunFiles(run).metrics)
    steps = Store(RunFiles(run).checkpoints).steps()
    step = max(trained.get("step", 0), steps[-1] if steps else 0)
    loss, validation = _number(trained.get("loss")), _number(losses_of(evaluated).get("validation"))
    return run.name, f"{step}/{until}", loss, validation, _state(run, bool(steps) and steps[-1] >= until)


def _number(loss: object) -> str:
    return f"{loss:.4f}" if isinstance(loss, int | float) else "-"


def state_of(run: Path) -> str:
    """Return the state of a run, or how it ended."""
    steps, until = Store(RunFiles(run).checkpoints).steps(), steps_of(run)
    return _state(run, until is not None and bool(steps) and steps[-1] >= until)


def _state(run: Path, complete: bool) -> str:
    holder, ended = read_holder(RunFiles(run).lease), read_ended(run)
    if holder is not None and holder.is_alive() is not False:
        return f"running on {holder.host}"
    if complete:
        return "complete"
    if ended is None:
        return "killed" if holder is not None else "not running"
    return f"exit code {ended['code']}: {ended.get('reason')}"


def _last_records(metrics: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return the last complete records of training and of an evaluation, from the end of the file."""
    trained: dict[str, float] = {}
    evaluated: dict[str, float] = {}
    for most in (TAIL_BYTES, MORE_BYTES):
        lines, is_all = _tail(metrics, most)
        for line in reversed(lines):
            entry = parse_line(line)
            if entry is None or not isinstance(entry.get("step"), int):
                continue
            if not trained and "loss" in entry:
                trained = entry
            if not evaluated and "validation" in losses_of(entry):
                evaluated = entry
            if trained and evaluated:
                return trained, evaluated
        if is_all:
            break
    return trained, evaluated


def _tail(metrics: Path, most: int) -> tuple[list[bytes], bool]:
    """Return the last lines of a file, and whether they are all lines."""
    try:
        with metrics.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - most))
            return file.read().splitlines(keepends=True), size <= most
    except OSError:
        return [], True


def curve(points: Sequence[tuple[int, float]]) -> Iterator[str]:
    """Draw a loss curve in one line, as means of equal numbers of points; nothing for fewer than 8 points."""
    if len(points) < 8:
        return
    columns = min(WIDTH, len(points))
    cuts = [len(points) * column // columns for column in range(columns + 1)]
    parts = [points[a:b] for a, b in pairwise(cuts)]
    means = [sum(loss for _, loss in part) / len(part) for part in parts]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    bars = "".join(BARS[round((mean - low) * scale)] for mean in means)
    yield f"loss curve    {bars}"
    yield f"              steps {points[0][0]} to {points[-1][0]}, {low:.4f} to {high:.4f}"


def goodput_line(goodput: Goodput) -> str:
    """Return a line with the effective training time ratio, and where the rest of the time went."""
    rest = [
        f"{name} {seconds / goodput.wall_s:.1%}"
        for name, seconds in goodput.seconds.items()
        if name != "productive" and seconds > 0.001 * goodput.wall_s
    ]
    starts = "1 start" if goodput.starts == 1 else f"{goodput.starts} starts"
    wall = duration(goodput.wall_s)
    return f"{goodput.ratio:.1%} of {wall} in {starts} were steps that lasted; {', '.join(rest)}"
