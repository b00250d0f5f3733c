"""Recognizes configurations of other stacks in files that Forge cannot read."""

from __future__ import annotations

import tomllib
from pathlib import Path

from forge_trainer.config.job import Job
from forge_trainer.migrate.command import STACKS
from forge_trainer.migrate.convert import Stack, flatten

KNOWN_SHARE = 0.8
"""The fraction of keys that a stack must know, besides a section that Forge does not have."""


def remedy(path: Path | str, asked: str | None = None) -> str:
    """Return a line about how to convert a file of another stack; empty if it is no such file.

    Args:
        path: path of the file.
        asked: the stack that the user named for the file.
    """
    try:
        settings = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError):
        return ""
    shares = {name: _share(settings, stack) for name, stack in STACKS.items()}
    name = max(shares, key=lambda one: shares[one])
    if shares[name] < KNOWN_SHARE or name == asked:
        return ""
    return f"This is a file of {STACKS[name].name}: forge convert --from {name} {path} --out OURS.toml\n"


def _share(settings: dict[str, object], stack: Stack) -> float:
    """Return the fraction of keys that a stack knows; 0 if all sections also exist in Forge."""
    foreign = {key.partition(".")[0] for key in stack.keys} - set(Job.__struct_fields__)
    keys = flatten(settings, stack.keys)
    return len(keys.keys() & stack.keys.keys()) / len(keys) if foreign & settings.keys() else 0.0
