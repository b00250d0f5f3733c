"""Finds the state of each run of a study, and why runs failed. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from forge_ckpt.lease import read_holder
from forge_ckpt.store import Store
from forge_config import ConfigError
from forge_resilience.exit_codes import ExitCode

from forge_trainer.run_dir.files import RunFiles, read_ended, recorded_changes
from forge_trainer.study.points import Point

TAIL_BYTES = 1 << 14
LOGS = "logs"
Kind = Literal["complete", "running", "stopped", "failed", "waiting"]


class State(NamedTuple):
    """The state of a run.

    Attributes:
        kind: `stopped` continues when it is started again, `failed` needs a person, `waiting` has not
            begun.
        step: step of its newest checkpoint.
        code: exit code of its last start; None if there is none.
        reason: reason of its end, in words.
    """

    kind: Kind
    step: int = 0
    code: int | None = None
    reason: str = ""


def log_of(root: Path, name: str) -> Path:
    """Return the log file of a run started on this machine."""
    return root / LOGS / f"{name}.log"


def state_of(point: Point, root: Path) -> State:
    """Return the state of a run, from its folder and its log."""
    run, log = root / point.name, log_of(root, point.name)
    steps = Store(RunFiles(run).checkpoints).steps() if RunFiles(run).checkpoints.exists() else []
    step = steps[-1] if steps else 0
    holder = read_holder(RunFiles(run).lease)
    if holder is not None and holder.is_alive() is not False:
        return State("running", step, None, f"on {holder.host}")
    try:
        recorded_changes(point.job, allowed=False)
    except ConfigError as error:
        return State("failed", step, None, " ".join(str(error).split()))
    if step >= point.job.train.steps:
        return State("complete", step, 0)
    code = _code_of(log)
    if (ended := read_ended(run)) is not None and code in (None, ended["code"]):
        code, reason = ended["code"], str(ended.get("reason") or ended.get("name"))
    else:
        reason = last_line(log)
    if code is None:
        return State("stopped", step, None, "was killed") if run.exists() else State("waiting")
    goes_on = code in (ExitCode.PREEMPTED, ExitCode.LOCKED, 0) or code < 0
    return State("stopped" if goes_on else "failed", step, code, reason)


def last_line(log: Path) -> str:
    """Return the last line of a log that is neither empty nor an exit code."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    texts = [line.strip() for line in lines if line.strip() and not line.startswith(EXITED)]
    return texts[-1] if texts else ""


EXITED = "forge study: exit code "
"""The beginning of the last line of a log once its start has ended."""


def _code_of(log: Path) -> int | None:
    """Return the exit code of the last start from its log; None if it still runs or was killed."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return None
    if not lines or not lines[-1].startswith(EXITED):
        return None
    return int(lines[-1].removeprefix(EXITED))


def summary(states: Sequence[State]) -> str:
    """Count the states in words, such as `7 complete, 1 failed`."""
    kinds: dict[str, int] = {}
    for state in states:
        kinds[state.kind] = kinds.get(state.kind, 0) + 1
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())
