"""Which nodes a job should not get again: those that were blamed for trouble more than once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_resilience.exit_codes import ExitCode

from forge_trainer.run_dir.files import RunFiles, read_lines

TWICE = 2
"""A node may be blamed once by chance, or for what it waited for."""

MOST = 3
"""So many nodes are left out at most: a run that blames everyone is itself to blame."""


def suspect_of(ended: Mapping[str, Any] | None) -> str | None:
    """The node that a start blames as it ends by a hang; None if it blames none, or several."""
    if ended is None or ended.get("code") != ExitCode.HUNG:
        return None
    hosts = ended.get("hosts", [])
    return hosts[0] if len(hosts) == 1 else None


def suspects(directory: Path) -> list[str]:
    """The nodes to leave out, the most blamed first."""
    files = RunFiles(directory)
    blamed = [start["suspect"] for start in read_lines(files.starts, "suspect") if start["suspect"]]
    for incident in read_lines(files.incidents, "hosts"):
        if len(incident["hosts"]) == 1:
            blamed += incident["hosts"]
    return [host for host, count in Counter(blamed).most_common(MOST) if count >= TWICE]
