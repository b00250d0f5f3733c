"""Reads facts about a run from its files, except metrics. Imports neither modules of the run nor torch."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from forge_ckpt.store import Store
from forge_config import ConfigError

from forge_trainer.hooks.ledger import read_ledger
from forge_trainer.report.runs import runs_in
from forge_trainer.report.status import summary
from forge_trainer.run_dir.files import RunFiles, read_history, read_lines

PLACES = ("job.name", "job.root")
"""Keys in which any two runs differ, without influence on the computation."""

SEEDS = ("job.seed", "data.seed")
"""Keys in which repetitions of a run differ."""


@dataclass(frozen=True)
class Mark:
    """An event at a step.

    Attributes:
        step: steps taken before the event.
        kind: `start`, `change`, or the kind of an incident.
        text: description of the event.
    """

    step: int
    kind: str
    text: str


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """Find the runs in folders, each a run or a folder of runs; each run once, in the given order.

    Raises:
        ConfigError: a folder is neither.
    """
    found: dict[Path, Path] = {}
    for folder in folders:
        runs = [folder] if RunFiles(folder).config.exists() else runs_in(folder)
        if not runs:
            raise ConfigError(
                f"{folder} is no run and no folder of runs: there is no config.toml, which the first step of "
                "a run writes, in it or right below it"
            )
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def names_of(runs: Sequence[Path]) -> list[str]:
    """Return a name for each run: its folder, with as many parent folders as make names unique."""
    parts = [run.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(one[-depth:]) for one in parts]
        if len(set(names)) == len(names):
            return [legible(name) for name in names]
    return [legible("/".join(one)) for one in parts]


def legible(name: str) -> str:
    """Return the name of a file as text; bytes that are no UTF-8 become question marks."""
    return name.encode(errors="replace").decode()


def config_of(run: Path) -> dict[str, Any]:
    """Read the configuration of a run by dotted keys; items of lists have keys, too, from 0.

    If a key was changed during the run, its value lists all values with the step of each change.

    Raises:
        ConfigError: the configuration cannot be read.
    """
    try:
        tree = tomllib.loads(RunFiles(run).config.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{RunFiles(run).config} cannot be used: {error}") from None
    found = dict(_flat(tree, ""))
    values: dict[str, str] = {}
    for event in read_history(run):
        key, step = event["key"], event.get("step")
        values.setdefault(key, str(event.get("old")))
        values[key] += f", {event.get('new')} from step {step}"
    return found | values


def _flat(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list) and any(isinstance(one, dict) for one in tree):
        for number, value in enumerate(tree):
            yield from _flat(value, f"{prefix}.{number}")
    else:
        yield prefix, tree


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in which configurations differ, without `PLACES`, in the order of the files."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [
        key
        for key in keys
        if key not in PLACES and any(a.get(key) != b.get(key) for a, b in pairwise(configs))
    ]


def marks_of(run: Path) -> list[Mark]:
    """Return the events of a run: starts, incidents and changed keys, by step."""
    found: list[Mark] = []
    for before, line in pairwise(read_ledger(run)):
        if line.stretch != before.stretch:
            again = before.step - line.from_step
            lost = f"; {again} steps were done again" if again > 0 else ""
            found.append(Mark(line.from_step, "start", f"went on from step {line.from_step}{lost}"))
    for incident in read_lines(RunFiles(run).incidents, "kind"):
        step = incident.get("step", incident.get("first"))
        if isinstance(step, int):
            found.append(Mark(step, str(incident["kind"]), summary(incident)))
    for event in read_history(run):
        if isinstance(step := event.get("step"), int):
            text = f"{event['key']}: {event.get('old')} -> {event.get('new')}"
            found.append(Mark(step, "change", text))
    return sorted(found, key=lambda mark: mark.step)


def checkpoints_of(run: Path) -> list[tuple[int, Path]]:
    """Return step and folder of each checkpoint of a run."""
    store = Store(RunFiles(run).checkpoints)
    try:
        return [(step, store.folder(step)) for step in store.steps()]
    except OSError:
        return []


def json_of(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty if there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
