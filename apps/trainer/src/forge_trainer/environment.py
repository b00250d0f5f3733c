"""On what a run was started: what one needs to know to run it again."""

import os
import platform
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path


def environment() -> dict[str, object]:
    """Machine, commit, versions, the command, the allocation."""
    return {
        "command": sys.argv,
        "folder": str(Path.cwd()),
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


def _commit() -> str | None:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
