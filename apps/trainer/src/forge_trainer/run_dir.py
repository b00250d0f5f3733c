"""What a run leaves on disk beside its checkpoints, and whether it may be continued with a given job."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from forge_config import ConfigError, diff, to_toml

from forge_trainer.job import Job, load_job

FREE_SECTIONS = (
    "mesh.",
    "fsdp.",
    "activation_checkpointing.",
    "compile.",
    "track.",
    "checkpoint.",
    "resilience.",
    "eval.",
    "hooks.",
)
FREE_KEYS = ("job.root", "train.micro_batch", "train.log_every_steps", "data.workers", "data.cache_dir")
"""What may change when a run is continued: it does not change what is learnt, beyond float rounding."""


def config_path(directory: Path) -> Path:
    """Where the resolved job of a run lies."""
    return directory / "config.toml"


def open_job(directory: Path) -> Job:
    """The job of a run directory, wherever it lies now.

    Raises:
        ConfigError: there is no run.
    """
    if not config_path(directory).exists():
        raise ConfigError(f"{directory} is no run: it has no {config_path(directory).name}")
    here = directory.resolve()
    return load_job(
        config_path(directory), [f'--job.root="{here.parent}"', f'--job.name="{here.name}"']
    ).value


def require_same_job(job: Job) -> None:
    """Refuse to continue a run with a job that would train something else.

    Raises:
        ConfigError: listing each key that differs, with both values.
    """
    path = config_path(job.job.directory)
    if not path.exists():
        return
    changes = [change for change in diff(load_job(path).value, job) if not _free(change.key)]
    if changes:
        listed = "\n".join(
            f"  {change.key}: the run has {change.a!r}, now given {change.b!r}" for change in changes
        )
        raise ConfigError(
            f"{job.job.directory} was started with a different configuration:\n{listed}\n"
            "Give it back its values, or choose another job.name to start a new run."
        )


def _free(key: str) -> bool:
    return key in FREE_KEYS or key.startswith(FREE_SECTIONS)


def describe(job: Job, imports: Sequence[str]) -> None:
    """Write `config.toml` and `environment.json`; each appears whole or not at all."""
    directory = job.job.directory
    directory.mkdir(parents=True, exist_ok=True)
    _write(config_path(directory), to_toml(job, imports=imports))
    _write(directory / "environment.json", json.dumps(environment(), indent=2) + "\n")


def environment() -> dict[str, object]:
    """What one needs to know to run a job again: machine, commit, versions, the command, the allocation."""
    return {
        "command": sys.argv,
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


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)
