"""What the files of a run say of it beside its metrics. Nothing of a run is imported, and no torch."""

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
"""Keys in which any two runs differ, and which change nothing of what is computed."""

SEEDS = ("job.seed", "data.seed")
"""Keys in which runs that are repetitions of each other differ."""


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step.

    Attributes:
        step: steps taken then.
        kind: `start`, `change`, or that of an incident.
        text: what happened.
    """

    step: int
    kind: str
    text: str


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """The runs that are meant by folders of runs or of several runs, each once, as they were named.

    Raises:
        ConfigError: one is neither.
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
    """A name for each run: its folder, with as many parent folders as make names unique."""
    parts = [run.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(one[-depth:]) for one in parts]
        if len(set(names)) == len(names):
            return [legible(name) for name in names]
    return [legible("/".join(one)) for one in parts]


def legible(name: str) -> str:
    """A name of a file as text: bytes that are no UTF-8 are question marks."""
    return name.encode(errors="replace").decode()


def config_of(run: Path) -> dict[str, Any]:
    """The configuration of a run by key, with dots between; items of lists are keys too, from 0.

    Of a key that was changed while the run lasted, the value lists all values, and the step of each change.

    Raises:
        ConfigError: it cannot be read.
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
    """The keys in which configurations differ, those of places left out, in the order of the files."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [
        key
        for key in keys
        if key not in PLACES and any(a.get(key) != b.get(key) for a, b in pairwise(configs))
    ]


def marks_of(run: Path) -> list[Mark]:
    """What happened in a run: its starts, its incidents, the keys that were changed; by step."""
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
    """The checkpoints of a run: step and folder."""
    store = Store(RunFiles(run).checkpoints)
    try:
        return [(step, store.folder(step)) for step in store.steps()]
    except OSError:
        return []


def json_of(path: Path) -> dict[str, Any]:
    """An object in a file; empty where there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
