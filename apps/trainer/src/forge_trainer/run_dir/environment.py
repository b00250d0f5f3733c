"""Records the environment of a start, so that it can be reproduced: versions, commit, hardware."""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

FILE = "environment.json"
"""The file of the environment in a run directory."""


VARIABLES = (
    "CUDA_DEVICE_ORDER",
    "CUDA_HOME",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NCCL_ALGO",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_NET",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_CLUSTER_NAME",
    "SLURM_CPUS_PER_TASK",
    "SLURM_GPUS_ON_NODE",
    "SLURM_GPUS_PER_NODE",
    "SLURM_JOB_END_TIME",
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES",
    "SLURM_JOB_PARTITION",
    "SLURM_JOB_QOS",
    "SLURM_JOB_START_TIME",
    "SLURM_MEM_PER_NODE",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_RESTART_COUNT",
    "WORLD_SIZE",
)
"""The recorded variables. A prefix would not do: `SLURM_JWT` is a key to the whole account."""


def environment(beside: Path) -> dict[str, object]:
    """Return machine, commit, versions, command and allocation of this process.

    Args:
        beside: the folder of the configuration; modules that it imports may lie there.
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
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "packages": dict(sorted((d.name, d.version) for d in distributions())),
    }


def recorded_folder(directory: Path, key: str) -> Path | None:
    """Return a folder that `environment.json` of a run names under `key`; None if it does not exist here."""
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
