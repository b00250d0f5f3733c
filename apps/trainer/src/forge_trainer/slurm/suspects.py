"""Which nodes a job should not get again: those that were named for trouble more than once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_resilience.exit_codes import ExitCode

from forge_trainer.run_dir.files import RunFiles, read_lines

TWICE = 2
"""A node may be named once by chance, or for what it waited for."""

MOST = 3
"""So many nodes are left out at most: a run that blames everyone is itself to blame."""

_NAMED = re.compile(r"rank \d+ on (\S+)")


def suspect_of(ended: Mapping[str, Any] | None) -> str | None:
    """The node that a start blames as it ends by a hang; None if it blames none, or several."""
    if ended is None or ended.get("code") != ExitCode.HUNG:
        return None
    blamed = str(ended.get("reason", "")).partition(", while others")[0]
    named = {host.partition(".")[0] for host in _NAMED.findall(blamed)}
    return named.pop() if len(named) == 1 else None


def suspects(directory: Path) -> list[str]:
    """The nodes to leave out, the most blamed first."""
    files = RunFiles(directory)
    named = [start["suspect"] for start in read_lines(files.starts, "suspect") if start["suspect"]]
    for incident in read_lines(files.incidents, "why"):
        hosts = {host.partition(".")[0] for host in _NAMED.findall(str(incident["why"]))}
        if "its hardware is suspect" in incident["why"] and len(hosts) == 1:
            named += hosts
    return [host for host, count in Counter(named).most_common(MOST) if count >= TWICE]
