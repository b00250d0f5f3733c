"""The files in the directory of a run, and whether the run may continue with a given configuration.

config.toml       the resolved job; there once the run has taken a step
environment.json  machine, versions and folder of the last start; readable by its user only
history.jsonl     each change of a key that may change as a recorded event: step, key, old, new, when
incidents.jsonl   what went wrong and what was done: rollbacks, steps repeated, copies that differed
ledger.jsonl      where the time of each start went
metrics.jsonl     the metrics
experts.jsonl     tokens of each expert, by the hook expert-load
checkpoints/      see forge_ckpt.store
lease/            who writes here, see forge_ckpt.lease
exit.json         how the last start ended
profile/          traces, summaries and snapshots of memory, by the hook profile
report.html       the output of `forge report`
plan.json         the planned memory of a start, if its GPU is known
hang/             which rank hung in the last start, stacks and collectives of all ranks
hang-before/      the content of hang/ when the last start began
starts.jsonl      how each start in a job of SLURM ended, written by the batch script
PROGRESS          the highest step ever saved; also in checkpoints/, and in .progress/ beside the runs, so
                  that a disk that is missing is not taken for a new run
"""

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from forge_ckpt.disk import write_durably
from forge_config import Change, Config, ConfigError, Judged, MayChange, judge, to_toml
from forge_config.load import load_sections

from forge_trainer.config.job import Job, load_job
from forge_trainer.config.train import TrainConfig
from forge_trainer.run_dir.environment import FILE, recorded_folder


class RunFiles:
    """The paths of the files in a run directory."""

    def __init__(self, directory: Path) -> None:
        self.config = directory / "config.toml"
        self.environment = directory / FILE
        self.history = directory / "history.jsonl"
        self.incidents = directory / "incidents.jsonl"
        self.ledger = directory / "ledger.jsonl"
        self.metrics = directory / "metrics.jsonl"
        self.checkpoints = directory / "checkpoints"
        self.lease = directory / "lease"
        self.exit = directory / "exit.json"
        self.starts = directory / "starts.jsonl"
        self.hang = directory / "hang"
        self.profile = directory / "profile"
        self.report = directory / "report.html"
        self.plan = directory / "plan.json"
        self.progress_marks = [directory / "PROGRESS", directory.parent / ".progress" / directory.name]


def read_job(directory: Path, overrides: Sequence[str] = ()) -> Job:
    """Read the job of a run; `job.root` and `job.name` follow the directory; import the run's modules.

    Args:
        directory: the run directory.
        overrides: texts such as `--mesh.tp=2` that replace values of the run.

    Raises:
        ConfigError: there is no run that has taken a step, its `config.toml` cannot be used, or it belongs to
            another user and would import code.
    """
    require_trust(directory)
    job = load_job(_config_of(directory), overrides).value
    here = directory.resolve()
    place = msgspec.structs.replace(job.job, root=str(here.parent), name=here.name)
    return msgspec.structs.replace(job, job=place)


def require_trust(directory: Path) -> None:
    """Refuse to import code that another user's run names, unless `FORGE_TRUST=1` allows it.

    Raises:
        ConfigError: the run belongs to another user, and its configuration names modules to import.
    """
    owner = _config_of(directory).stat().st_uid
    code = read_outline(directory).code
    if code and owner != os.geteuid() and os.environ.get("FORGE_TRUST") != "1":
        raise ConfigError(
            f"{directory} is a run of another user (number {owner}), and would import {', '.join(code)}; "
            "look at these modules, and set FORGE_TRUST=1 if they may be executed"
        )


class Outline(Config):
    """The part of a run's configuration that can be read without importing plugs.

    Attributes:
        train: the section `[train]`.
        data: the section `[data]`, not decoded.
        imports: modules that the run imports.
        hooks: the section `[hooks]`, not decoded.
    """

    train: TrainConfig
    data: dict[str, Any] = {}
    imports: list[str] = []
    hooks: dict[str, Any] = {}

    @property
    def max_tokens(self) -> int | None:
        """Tokens of a sequence; None if the file does not give them."""
        tokens = self.data.get("max_tokens")
        return tokens if isinstance(tokens, int) and tokens > 0 else None

    @property
    def code(self) -> list[str]:
        """The code that the run would execute: modules that it imports, and paths of hook classes."""
        hooks = [hook.get("path") for hook in self.hooks.values() if isinstance(hook, dict)]
        return [*self.imports, *(path for path in hooks if isinstance(path, str))]


def read_outline(directory: Path) -> Outline:
    """Read the outline of a run from the text of its configuration alone.

    Raises:
        ConfigError: there is no run that has taken a step, or its `config.toml` cannot be used.
    """
    return load_sections(Outline, _config_of(directory))


def _config_of(directory: Path) -> Path:
    path = RunFiles(directory).config
    if not path.exists():
        raise ConfigError(f"{directory} is no run: there is no {path.name}, which its first step writes")
    return path


def steps_of(directory: Path) -> int | None:
    """Return how many steps a run is to take; None if there is no run yet, or it cannot be read."""
    try:
        return read_outline(directory).train.steps
    except ConfigError:
        return None


def started_in(directory: Path) -> Path:
    """Return the base of a run's relative paths and imports: the folder of its last start, if it is here."""
    return recorded_folder(directory, "folder") or Path.cwd()


def recorded_changes(job: Job, allowed: bool) -> list[Change]:
    """Return the keys in which a job differs from the run that it continues; free keys are left out.

    Args:
        job: the new configuration.
        allowed: whether keys that may change as a recorded event may differ.

    Raises:
        ConfigError: a key differs that may not; lists each such key with both values.
    """
    path = RunFiles(job.job.directory).config
    if not path.exists():
        return []
    judged = [one for one in judge(load_job(path).value, job) if one.may is not MayChange.FREELY]
    if all(allowed and one.may is MayChange.RECORDED for one in judged):
        return [one.change for one in judged]
    raise ConfigError(
        f"{job.job.directory} was started with a different configuration:\n"
        + "\n".join(_line(one) for one in judged)
        + "\nGive it back its values, or choose another job.name to start a new run."
    )


def _line(judged: Judged) -> str:
    key, old, new = judged.change
    may = "; --change allows and records this" if judged.may is MayChange.RECORDED else ""
    return f"  {key}: the run has {old!r}, now given {new!r}{may}"


def write_config(job: Job, imports: Sequence[str]) -> None:
    """Write `config.toml` atomically."""
    write_whole(RunFiles(job.job.directory).config, to_toml(job, imports=imports))


def append_history(directory: Path, step: int, changes: Sequence[Change]) -> None:
    """Add changes to `history.jsonl`; a change that equals the last line for its key is not added again."""
    path = RunFiles(directory).history
    known = {event["key"]: event | {"when": ""} for event in read_history(directory)}
    events = [{"step": step, "key": key, "old": old, "new": new, "when": ""} for key, old, new in changes]
    fresh = [event | {"when": now()} for event in events if known.get(event["key"]) != event]
    if fresh:
        torn = path.exists() and not path.read_bytes().endswith(b"\n")
        with path.open("a") as file:
            file.writelines(["\n"] * torn + [json.dumps(event) + "\n" for event in fresh])


def read_ended(directory: Path) -> dict[str, Any] | None:
    """Read `exit.json`; None while the run goes on, or if it was killed."""
    try:
        ended = json.loads(RunFiles(directory).exit.read_text())
    except (OSError, ValueError):
        return None
    return ended if isinstance(ended, dict) and isinstance(ended.get("code"), int) else None


def read_history(directory: Path) -> list[dict[str, Any]]:
    """Read the events of `history.jsonl`, oldest first; unreadable lines are left out."""
    return [
        event for event in read_lines(RunFiles(directory).history, "key") if isinstance(event["key"], str)
    ]


def read_lines(path: Path, key: str) -> list[dict[str, Any]]:
    """Read the objects of a JSON Lines file that contain `key`; skip damaged lines or an unreadable file."""
    try:
        with path.open("rb") as file:
            return [entry for line in file if (entry := parse_line(line)) is not None and key in entry]
    except OSError:
        return []


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the object in a complete line of JSON; None if the line is incomplete or no object."""
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def write_whole(path: Path, text: str, mode: int | None = None) -> None:
    """Write a file atomically; with `mode`, the file has this mode from its first moment on."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if mode is not None:
            partial.unlink(missing_ok=True)
            os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        write_durably(partial, text.encode())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def now() -> str:
    """The time, ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
