"""`forge report`: writes one HTML file about one or several runs, which needs no network."""

from __future__ import annotations

import argparse
import html
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from forge_config import ConfigError
from forge_resilience.exit_codes import ExitCode
from forge_resilience.goodput import add_up

from forge_trainer.hooks.ledger import read_ledger
from forge_trainer.report.charts import charts_of
from forge_trainer.report.facts import (
    checkpoints_of,
    config_of,
    differing,
    find_runs,
    json_of,
    legible,
    marks_of,
    names_of,
)
from forge_trainer.report.runs import goodput_line, state_of
from forge_trainer.report.series import Series, read_metrics, thinned
from forge_trainer.run_dir.files import RunFiles, now, steps_of, write_whole

POINTS, LEAST, MOST = 200_000, 60, 4_000
"""The number of points of all curves together; the least and the most points of one curve."""

AXIS_POINTS = 500
"""The number of points that map steps to tokens and hours."""

MARKS = 200
"""The number of marks of a run that are shown, the last ones."""


def write_report(options: argparse.Namespace) -> int:
    """Run `forge report`.

    Raises:
        ConfigError: a folder is no run, or the page cannot be written.
    """
    folders = [Path(one) for one in options.runs]
    runs = find_runs(folders)
    out = Path(options.out) if options.out else _place(folders)
    text = page(runs, out.parent)
    try:
        write_whole(out, text)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}; name another file with --out") from None
    which = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    sys.stdout.write(f"{legible(str(out))}: {which}, {len(text.encode()) / 1e6:.1f} MB\n")
    return ExitCode.DONE


def _place(folders: Sequence[Path]) -> Path:
    """Return the path of the report: in the folder if there is only one, else in the current folder."""
    return (folders[0] if len(folders) == 1 else Path()) / "report.html"


def page(runs: Sequence[Path], folder: Path) -> str:
    """Return the HTML of the page.

    Args:
        runs: folders of the runs.
        folder: folder of the page, to which links are relative.

    Raises:
        ConfigError: the configuration of a run cannot be read.
    """
    names = names_of(runs)
    metrics = [read_metrics(RunFiles(run).metrics) for run in runs]
    configs = [config_of(run) for run in runs]
    facts = {
        "title": names[0] if len(runs) == 1 else f"{len(runs)} runs",
        "made": now(),
        "runs": [
            _run(name, run, measured, folder)
            for name, run, measured in zip(names, runs, metrics, strict=True)
        ],
        "charts": _charts(metrics),
        "differences": _differences(configs) if len(runs) > 1 else [],
    }
    assets = files("forge_trainer.report") / "page"

    def asset(name: str) -> str:
        return (assets / name).read_text(encoding="utf-8")

    parts = {
        "TITLE": html.escape(facts["title"]),
        "LIBRARY_STYLE": asset("uPlot.min.css"),
        "STYLE": asset("page.css"),
        "LICENCE": asset("uPlot.LICENSE"),
        "LIBRARY": asset("uPlot.iife.min.js"),
        "SCRIPT": asset("page.js"),
        # `</script>` in a text must not end the script
        "DATA": json.dumps(facts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    # at once: a part may hold what looks like the place of another
    return re.sub("@@([A-Z_]+)@@", lambda place: parts[place[1]], asset("page.html"))


def _run(name: str, run: Path, metrics: Mapping[str, Series], folder: Path) -> dict[str, Any]:
    losses = metrics.get("loss")
    goodput = add_up(read_ledger(run))
    environment = json_of(RunFiles(run).environment)
    marks = marks_of(run)
    return {
        "name": name,
        "path": str(run.resolve()),
        "state": state_of(run),
        "step": losses.steps[-1] if losses is not None else 0,
        "until": steps_of(run),
        "axes": _axes(metrics),
        "marks": [[mark.step, mark.kind, mark.text] for mark in marks[-MARKS:]],
        "marks_left": max(0, len(marks) - MARKS),
        "goodput": goodput_line(goodput) if goodput.wall_s else "",
        "checkpoints": [
            [step, os.path.relpath(place.resolve(), folder.resolve())] for step, place in checkpoints_of(run)
        ],
        "last": {
            n: last for n, series in metrics.items() if (last := series.last) is not None and _is_shown(n)
        },
        "config": RunFiles(run).config.read_text(errors="replace"),
        "machine": {
            key: environment.get(key) for key in ("host", "commit", "python") if environment.get(key)
        },
        "plan": _plan(json_of(RunFiles(run).plan), metrics),
    }


def _is_shown(name: str) -> bool:
    """Return whether the table shows the last value of a series."""
    return name.startswith("eval/") or name in (
        "loss",
        "tokens",
        "tokens_per_s",
        "mfu",
        "memory_gib",
        "goodput",
    )


def _axes(metrics: Mapping[str, Series]) -> dict[str, list[float]]:
    """Return tokens and hours at some steps, between which the page interpolates linearly."""
    tokens, times = metrics.get("tokens"), metrics.get("time")
    if tokens is None:
        return {}
    count = len(tokens.steps)
    places = sorted({*range(0, count, max(1, count // AXIS_POINTS)), count - 1})
    places = [at for at in places if math.isfinite(tokens.values[at])]
    found: dict[str, list[float]] = {
        "step": [tokens.steps[at] for at in places],
        "tokens": [tokens.values[at] for at in places],
    }
    if times is not None and times.steps == tokens.steps and math.isfinite(sum(times.values)):
        begin = times.values[0]
        found["hours"] = [round((times.values[at] - begin) / 3600, 5) for at in places]
    return found


def _charts(metrics: Sequence[Mapping[str, Series]]) -> list[dict[str, Any]]:
    """Return the charts of all runs, with thinned curves so that the page stays small."""
    grouped = charts_of(name for one in metrics for name in one)
    curves = sum(name in one for one in metrics for _, names in grouped for name in names)
    most = min(MOST, max(LEAST, POINTS // max(1, curves)))
    return [
        {
            "title": chart.title,
            "log": chart.log,
            "more": chart.more,
            "curves": [
                {"run": number, "name": name, **_curve(one[name], most)}
                for name in names
                for number, one in enumerate(metrics)
                if name in one
            ],
        }
        for chart, names in grouped
    ]


def _curve(series: Series, most: int) -> dict[str, list[Any]]:
    places = thinned(series.values, most)
    return {
        "x": [series.steps[at] for at in places],
        "y": [_rounded(series.values[at]) for at in places],
    }


def _rounded(value: float) -> float | int | None:
    """Round to six digits, more than a screen shows; a value that is not finite becomes a gap."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _differences(configs: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return a row for each key in which runs differ: its name, and its value in each run."""
    return [
        [key, *("" if (value := config.get(key)) is None else str(value) for config in configs)]
        for key in differing(configs)
    ]


def _plan(plan: Mapping[str, Any], metrics: Mapping[str, Series]) -> list[list[Any]]:
    """Return rows of planned values, with the measured value if a metric has the same name."""
    rows: list[list[Any]] = []

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, one in value.items():
                add(f"{prefix}.{key}" if prefix else str(key), one)
            return
        name = prefix.rpartition(".")[2]
        series = metrics.get(prefix) or metrics.get(name)
        last = series.last if series is not None else None
        rows.append([prefix, str(value), "" if last is None else f"{last[1]:.6g}"])

    add("", dict(plan))
    return rows
