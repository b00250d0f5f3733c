"""On what a run was started: what one needs to know to run it again."""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

FILE = "environment.json"
"""Where a run directory keeps it."""


def environment(beside: Path) -> dict[str, object]:
    """Machine, commit, versions, the command, the allocation.

    Args:
        beside: the folder of the configuration, where modules that it imports may lie.
    """
    return {
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "config_folder": str(beside),
        "commit": _commit(),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "variables": {
            k: v for k, v in os.environ.items() if k.startswith(("SLURM_", "OMP_", "CUDA_", "NCCL_"))
        },
        "packages": dict(sorted((d.name, d.version) for d in distributions())),
    }


def recorded_folder(directory: Path, key: str) -> Path | None:
    """A folder that a run was last started with, by its key in `environment.json`; None if it is not here."""
    try:
        folder = Path(json.loads((directory / FILE).read_text())[key])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return folder if folder.is_dir() else None


def _commit() -> str | None:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
