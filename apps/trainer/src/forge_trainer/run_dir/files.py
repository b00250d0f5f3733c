"""The directory of a run: what lies where, and whether the run may go on with a given job.

config.toml       the resolved job; there once the run has taken a step
environment.json  on what it was last started, and from which folder; for its user only
history.jsonl     each change of a key that may change as a recorded event: step, key, old, new, when
incidents.jsonl   what went wrong and what was done: rollbacks, steps repeated, copies that differed
ledger.jsonl      where the time of each start went
metrics.jsonl     what was measured
experts.jsonl     tokens of each expert, by the hook expert-load
checkpoints/      see forge_ckpt.store
lease/            who writes here, see forge_ckpt.lease
exit.json         how the last start ended
profile/          traces, summaries and snapshots of memory, by the hook profile
report.html       what `forge report` made of it
plan.json         what a start was planned to need, where its GPU is known
hang/             which rank hung in the last start, stacks and collectives of all ranks
hang-before/      what lay in hang/ when it started
starts.jsonl      how each start in a job of SLURM ended, by its batch script
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
    """The names in a run directory."""

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
    """The job of a run, its name and root being where the directory lies now; imports what the run imports.

    Args:
        directory: of the run.
        overrides: texts such as `--mesh.tp=2`, in place of what the run had.

    Raises:
        ConfigError: there is no run that has taken a step, its `config.toml` cannot be used, or it is of
            somebody else and would have code executed.
    """
    require_trust(directory)
    job = load_job(_config_of(directory), overrides).value
    here = directory.resolve()
    place = msgspec.structs.replace(job.job, root=str(here.parent), name=here.name)
    return msgspec.structs.replace(job, job=place)


def require_trust(directory: Path) -> None:
    """See that no code of other users is executed unless `FORGE_TRUST=1` allows it.

    Raises:
        ConfigError: the configuration of a run is of another user, and names modules to be imported.
    """
    owner = _config_of(directory).stat().st_uid
    code = read_outline(directory).code
    if code and owner != os.geteuid() and os.environ.get("FORGE_TRUST") != "1":
        raise ConfigError(
            f"{directory} is a run of another user (number {owner}), and would import {', '.join(code)}; "
            "look at these modules, and set FORGE_TRUST=1 if they may be executed"
        )


class Outline(Config):
    """The configuration of a run as far as it can be read without importing plugs.

    Attributes:
        train: how long and in what portions it trains.
        data: its section, not decoded.
        imports: modules that the run imports.
        hooks: its section, not decoded.
    """

    train: TrainConfig
    data: dict[str, Any] = {}
    imports: list[str] = []
    hooks: dict[str, Any] = {}

    @property
    def max_tokens(self) -> int | None:
        """Tokens of a sequence, if the file says it."""
        tokens = self.data.get("max_tokens")
        return tokens if isinstance(tokens, int) and tokens > 0 else None

    @property
    def code(self) -> list[str]:
        """What the run would execute: modules that it imports, and classes of hooks by their path."""
        hooks = [hook.get("path") for hook in self.hooks.values() if isinstance(hook, dict)]
        return [*self.imports, *(path for path in hooks if isinstance(path, str))]


def read_outline(directory: Path) -> Outline:
    """The outline of a run, from the text of its configuration alone.

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
    """How many steps a run is to take; None where there is no run yet, or it cannot be read."""
    try:
        return read_outline(directory).train.steps
    except ConfigError:
        return None


def started_in(directory: Path) -> Path:
    """The folder that relative paths and imports of a run count from: that of its start, if it is here."""
    return recorded_folder(directory, "folder") or Path.cwd()


def recorded_changes(job: Job, allowed: bool) -> list[Change]:
    """The keys in which a job differs from the run that it continues, but for freely changeable ones.

    Args:
        job: the new one.
        allowed: keys that may change as a recorded event may do so.

    Raises:
        ConfigError: it would train something else; lists each key with both values.
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
    """Write `config.toml`, whole or not at all."""
    write_whole(RunFiles(job.job.directory).config, to_toml(job, imports=imports))


def append_history(directory: Path, step: int, changes: Sequence[Change]) -> None:
    """Add changes to `history.jsonl`; what is its last line for a key already is not added again."""
    path = RunFiles(directory).history
    known = {event["key"]: event | {"when": ""} for event in read_history(directory)}
    events = [{"step": step, "key": key, "old": old, "new": new, "when": ""} for key, old, new in changes]
    fresh = [event | {"when": now()} for event in events if known.get(event["key"]) != event]
    if fresh:
        torn = path.exists() and not path.read_bytes().endswith(b"\n")
        with path.open("a") as file:
            file.writelines(["\n"] * torn + [json.dumps(event) + "\n" for event in fresh])


def read_ended(directory: Path) -> dict[str, Any] | None:
    """What `exit.json` says; None while the run is on, or when it was killed."""
    try:
        ended = json.loads(RunFiles(directory).exit.read_text())
    except (OSError, ValueError):
        return None
    return ended if isinstance(ended, dict) and isinstance(ended.get("code"), int) else None


def read_history(directory: Path) -> list[dict[str, Any]]:
    """The events of `history.jsonl`, oldest first; a line that cannot be read is left out."""
    return [
        event for event in read_lines(RunFiles(directory).history, "key") if isinstance(event["key"], str)
    ]


def read_lines(path: Path, key: str) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines that hold `key`; damaged lines, and a file, are left out."""
    try:
        with path.open("rb") as file:
            return [entry for line in file if (entry := parse_line(line)) is not None and key in entry]
    except OSError:
        return []


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The object in a whole line of JSON, None if it is none."""
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def write_whole(path: Path, text: str, mode: int | None = None) -> None:
    """Write a file that appears whole or not at all; with a mode, nobody else ever opens it with another."""
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
