"""Finds the last starts of a SLURM job that made no progress."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

from forge_resilience.exit_codes import ExitCode

from forge_trainer.run_dir.files import RunFiles, read_lines

FUTILE = 3
"""The number of starts in a row that fail without a new checkpoint, after which the chain ends."""


def futile_starts(directory: Path) -> list[dict[str, Any]]:
    """Return the last starts in a row that failed with the same newest checkpoint, the newest first.

    Starts that found the run locked by another job do not count.
    """
    found: list[dict[str, Any]] = []
    for start in reversed(read_lines(RunFiles(directory).starts, "step")):
        if start.get("code") == ExitCode.LOCKED:
            continue
        if not start.get("failed") or (found and start["step"] != found[0]["step"]):
            break
        found.append(start)
    return found


def locked_starts(directory: Path) -> int:
    """Return how many of the last starts in a row found the run locked by another process."""
    starts = reversed(read_lines(RunFiles(directory).starts, "step"))
    return sum(1 for _ in takewhile(lambda start: start.get("code") == ExitCode.LOCKED, starts))


def crash_loop(directory: Path) -> str | None:
    """Return the message of a job that ended after futile starts; None otherwise."""
    futile = futile_starts(directory)
    if len(futile) < FUTILE:
        return None
    last, nodes = futile[0], {str(start["nodes"]) for start in futile if start.get("nodes")}
    where = f" on {', '.join(sorted(nodes))}" if nodes else ""
    return (
        f"crash loop    {len(futile)} starts in a row failed at step {last['step']} without a new "
        f"checkpoint, the last with exit code {last.get('code')}{where}; SLURM starts it no more"
    )
