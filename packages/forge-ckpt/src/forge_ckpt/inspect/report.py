"""Reports on checkpoints: lines for people, JSON for programs, the exit code. Imports no torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from forge_ckpt import manifest as manifests
from forge_ckpt.error import CheckpointError, DamagedError, UnreadableError, UnsupportedError
from forge_ckpt.pins import pins
from forge_ckpt.store import Store

FINE, FOUND, CANNOT = 0, 1, 2
"""Exit codes: all is well; something is damaged, missing or different; it cannot be done or told."""

Row = dict[str, Any]

SOUND = {"there", "intact"}
"""States of checkpoints that nothing is wrong with, as far as was looked."""


def say(line: str) -> None:
    """Write a line; characters that a terminal could not show, or would obey, are escaped."""
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(shown.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def say_json(fields: Mapping[str, Any]) -> None:
    """Write one object on one line."""
    sys.stdout.write(json.dumps(fields) + "\n")


def state_of(error: CheckpointError) -> str:
    """Return the state of a checkpoint in one word, from its error."""
    kinds = {DamagedError: "damaged", UnreadableError: "unreadable", UnsupportedError: "unsupported"}
    return kinds.get(type(error), "wrong")


def code_of(states: Iterable[str]) -> int:
    """The exit code for the states of the checkpoints."""
    found = {*states} - SOUND
    return FINE if not found else FOUND if "damaged" in found else CANNOT


def row(store: Store, step: int, verify: bool) -> Row:
    """Describe a checkpoint.

    Args:
        store: the checkpoints.
        step: its step.
        verify: read every byte; else only its manifest and the sizes of its files.
    """
    try:
        opened = store.verify(step) if verify else manifests.read(store.folder(step))
    except CheckpointError as error:
        return {"step": step, "state": state_of(error), "why": str(error)}
    return {
        "step": step,
        "state": "intact" if verify else "there",
        "MB": round(opened.num_bytes / 1e6, 1),
        "tensors": len(opened.tensors),
        "ranks": opened.world_size,
        "milestone": opened.milestone,
        "pinned": step in pins(store.root),
    }


def rows(store: Store, verify: bool) -> Iterator[Row]:
    """Describe all checkpoints, oldest first.

    A run may go on meanwhile: removed checkpoints are left out; if none is left, new ones are described as
    well.
    """
    reported: set[int] = set()
    sound = False
    while new := [step for step in store.steps() if step not in reported] if not sound else []:
        for step in new:
            reported.add(step)
            one = row(store, step, verify)
            if one["state"] == "damaged" and not os.path.lexists(store.folder(step)):
                continue
            sound = sound or one["state"] in SOUND
            yield one


def say_row(row: Row, as_json: bool) -> None:
    """Print the description of a checkpoint."""
    if as_json:
        return say_json(row)
    more = "  ".join(f"{value} {key}" for key, value in row.items() if key in ("MB", "tensors", "ranks"))
    marks = "".join(f"  {mark}" for mark in ("milestone", "pinned") if row.get(mark))
    say(f"{row['step']:>9}  {row['state']:<11}  {row.get('why', more + marks)}")
