"""Finds the nodes that a job should avoid: nodes blamed for trouble more than once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_resilience.exit_codes import ExitCode

from forge_trainer.run_dir.files import RunFiles, read_lines

TWICE = 2
"""The number of times that a node must be blamed; once may be chance, or the fault of another node."""

MOST = 3
"""The most nodes to leave out: a run that blames every node has a fault itself."""


def suspect_of(ended: Mapping[str, Any] | None) -> str | None:
    """Return the node that a start blames for a hang; None if it blames none, or several."""
    if ended is None or ended.get("code") != ExitCode.HUNG:
        return None
    hosts = ended.get("hosts", [])
    return hosts[0] if len(hosts) == 1 else None


def suspects(directory: Path) -> list[str]:
    """Return the nodes to leave out, the most blamed first."""
    files = RunFiles(directory)
    blamed = [start["suspect"] for start in read_lines(files.starts, "suspect") if start["suspect"]]
    for incident in read_lines(files.incidents, "hosts"):
        if len(incident["hosts"]) == 1:
            blamed += incident["hosts"]
    return [host for host, count in Counter(blamed).most_common(MOST) if count >= TWICE]
