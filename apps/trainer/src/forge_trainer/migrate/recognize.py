"""Whose configuration is a file that Forge cannot read?"""

from __future__ import annotations

import tomllib
from pathlib import Path

from forge_trainer.config.job import Job
from forge_trainer.migrate.command import STACKS
from forge_trainer.migrate.convert import Stack, flatten

KNOWN_SHARE = 0.8
"""A file is of a stack that knows this part of its keys, and has a section that Forge does not."""


def remedy(path: Path | str, asked: str | None = None) -> str:
    """A line that says how a file of another stack is converted; empty if it is none.

    Args:
        path: of the file.
        asked: the stack that it was taken for.
    """
    try:
        given = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError):
        return ""
    shares = {name: _share(given, stack) for name, stack in STACKS.items()}
    name = max(shares, key=lambda one: shares[one])
    if shares[name] < KNOWN_SHARE or name == asked:
        return ""
    return f"This is a file of {STACKS[name].name}: forge convert --from {name} {path} --out OURS.toml\n"


def _share(given: dict[str, object], stack: Stack) -> float:
    """The part of the keys that a stack knows; 0 where all sections are also ours."""
    foreign = {key.partition(".")[0] for key in stack.keys} - set(Job.__struct_fields__)
    keys = flatten(given, stack.keys)
    return len(keys.keys() & stack.keys.keys()) / len(keys) if foreign & given.keys() else 0.0
