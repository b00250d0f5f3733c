"""Decides after the end of a job whether it runs again. Runs in the batch script, without torch."""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forge_ckpt.lease import read_holder
from forge_ckpt.store import Store
from forge_resilience.exit_codes import ExitCode

from forge_trainer.run_dir.files import RunFiles, now, read_ended, steps_of
from forge_trainer.slurm.config import seconds
from forge_trainer.slurm.futile import FUTILE, futile_starts, locked_starts
from forge_trainer.slurm.script import LOGS
from forge_trainer.slurm.suspects import suspect_of, suspects

FINAL = {ExitCode.DONE, ExitCode.CONFIG, ExitCode.NOT_FINITE, ExitCode.DIVERGED}
"""Exit codes after which a new start would end in the same way."""

LOCKED_S = 30.0
"""The time that a job waits before it tries again a run to which another process writes."""

LOST = 1
"""The exit code of the script of a start that SLURM has already replaced; nobody reads it."""


def after_job(options: argparse.Namespace) -> int:
    """Run `forge after`: put the job back into the queue if that helps.

    Returns:
        0 if the run is complete or will continue; else the exit code with the reason.
    """
    directory = Path(options.directory)
    ended = _ended(directory)
    # without a number, scontrol shows all jobs of the cluster
    job_info = _scontrol("show", "job", _job()).stdout if _job() else ""
    state = _field("JobState", job_info)
    if ended is None and _is_replaced(state, job_info):
        return _say(
            LOST,
            f"this start was lost with a node or preempted; SLURM runs the job again by itself ({state})",
        )
    code = _code(ended, options.code, directory)
    try:
        failures = _remember(directory, code, ended)
    except OSError as error:  # without memory, a job that fails at once would run again for ever
        return _stop(options, code, f"{directory} cannot be written: {error}")
    if state == "CANCELLED" or _is_cancelled(state, job_info):
        return _stop(options, code, "cancelled")
    if state not in ("", "RUNNING"):
        return _say(code, f"exit code {code}: SLURM ends this job by itself ({state})")
    if (final := _final(options, directory, code, failures)) is not None:
        return _stop(options, *final)
    if code == ExitCode.LOCKED:
        time.sleep(LOCKED_S)
    if options.chained:
        without = suspects(directory)
        if without:
            _scontrol("update", f"JobId={options.chained}", f"ExcNodeList={','.join(without)}")
        return _say(ExitCode.DONE, f"exit code {code}; job {options.chained} goes on{_without(without)}")
    return _requeue(code, directory, job_info)


def _code(ended: dict[str, Any] | None, code: int, directory: Path) -> int:
    """Return the exit code that this start recorded; else the code of srun, if the checkpoints confirm it."""
    if ended:
        return int(ended["code"])
    # a process that leaves by itself, as with `os._exit(0)`, has not finished the run
    return ExitCode.FAILED if code == ExitCode.DONE and not _is_complete(directory) else code


def _final(options: argparse.Namespace, directory: Path, code: int, failures: int) -> tuple[int, str] | None:
    """Return the code and the reason why the job does not run again; None if it may."""
    if code in FINAL:
        return code, "complete" if code == ExitCode.DONE else "a human must look at it"
    if code == ExitCode.LOCKED and (why := _never_free(directory)):
        return code, why
    if failures >= FUTILE:
        return ExitCode.CRASH_LOOP, f"{failures} starts failed without a new checkpoint"
    return (code, "the cluster file says never again") if options.never else None


def _ended(directory: Path) -> dict[str, Any] | None:
    """Return the `exit.json` of this start, if any; srun knows only the highest code of all ranks."""
    ended = read_ended(directory)
    this = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    return ended if ended is not None and (ended.get("job"), ended.get("restart")) == this else None


def _is_complete(directory: Path) -> bool:
    """Return whether the newest checkpoint is at the last step."""
    steps = Store(RunFiles(directory).checkpoints).steps()
    until = steps_of(directory)
    return until is not None and bool(steps) and steps[-1] >= until


def _never_free(directory: Path) -> str | None:
    """Return why a job does not wait for a run of another process; None if the run may soon be free.

    Processes on a lost node may continue for a while; another job of SLURM runs again by itself.
    """
    holder = read_holder(RunFiles(directory).lease)
    other = holder.job if holder and holder.job != os.environ.get("SLURM_JOB_ID") else None
    if other and _field("JobState", _scontrol("show", "job", other).stdout) in ("RUNNING", "SUSPENDED"):
        return f"job {other} has this run"
    if locked_starts(directory) >= FUTILE:
        return f"{FUTILE} starts found the run in the hands of {holder or 'another process'}"
    return None


def _is_cancelled(state: str, job_info: str) -> bool:
    """Return whether an ending job was cancelled: neither preempted, nor at its time limit.

    While its script runs, SLURM only says that it is COMPLETING (22.05).
    """
    run_s, limit_s = (seconds(_field(name, job_info, r"[\d:-]+")) for name in ("RunTime", "TimeLimit"))
    in_time = run_s is not None and (limit_s is None or run_s < limit_s)
    return state == "COMPLETING" and in_time and _field("PreemptTime", job_info) == "None"


def _job() -> str:
    """Return the id of this job alone; the plain id of a task stands for its whole array (SLURM 22.05)."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


def _is_replaced(state: str, job_info: str) -> bool:
    """Return whether SLURM has requeued or restarted the job while this script of an old start still runs.

    The srun of a lost node may end with code 0.
    """
    restarts = _field("Restarts", job_info) or "0"
    return state in ("PENDING", "REQUEUED") or int(restarts) > int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def _shutdown_s(ended: dict[str, Any] | None) -> float | None:
    """Return the seconds since the run recorded its end; None if it recorded no time."""
    try:
        ended_at = datetime.fromisoformat(ended["when"]) if ended else None
        return None if ended_at is None else max(0.0, (datetime.now(UTC) - ended_at).total_seconds())
    except (KeyError, TypeError, ValueError):
        return None


def _remember(directory: Path, code: int, ended: dict[str, Any] | None) -> int:
    """Add this end to `starts.jsonl`; return how many starts in a row failed without a new checkpoint."""
    path = RunFiles(directory).starts
    steps = Store(RunFiles(directory).checkpoints).steps()
    step = steps[-1] if steps else 0
    failed = code not in (ExitCode.DONE, ExitCode.PREEMPTED, ExitCode.LOCKED)
    earlier = futile_starts(directory)
    futile = 1 + (len(earlier) if earlier and earlier[0]["step"] == step else 0) if failed else 0
    line = {
        "when": now(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
        "nodes": os.environ.get("SLURM_JOB_NODELIST"),
        "code": int(code),
        "shutdown_s": _shutdown_s(ended),
        "suspect": suspect_of(ended),
        "failed": failed,
        "step": step,
    }
    directory.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return futile


def _field(name: str, job_info: str, form: str = r"\w+") -> str:
    """Return a field of `scontrol show job`, such as JobState; empty without SLURM."""
    found = re.search(rf"\b{name}=({form})", job_info)
    return found[1] if found else ""


def _requeue(code: int, directory: Path, job_info: str) -> int:
    if "BatchFlag=1" not in job_info:
        return _say(code, f"exit code {code}; this is no batch job: start it again by hand")
    known = re.search(r"ExcNodeList=(\S+)", job_info)
    without = suspects(directory)
    if set(without) - set(known[1].split(",") if known else []) and (new := _submit(directory, without)):
        return _say(ExitCode.DONE, f"exit code {code}; job {new} takes its place{_without(without)}")
    put_back = _scontrol("requeue", _job())
    if put_back.returncode:
        # In a preemption SLURM does it by itself, and refuses to do it twice.
        return _say(code, f"exit code {code}; not put back into the queue: {put_back.stderr.strip()}")
    return _say(ExitCode.DONE, f"exit code {code}; job {_job()} is back in the queue")


def _submit(directory: Path, without: Sequence[str]) -> str | None:
    """Submit the same script as a new job; return its id, or None if that fails.

    The nodes of a job that runs, or that its own script requeued, cannot be changed (SLURM 22.05).
    """
    script = directory.parent / LOGS / f"{directory.name}.sh"
    if "SLURM_ARRAY_JOB_ID" in os.environ or not script.exists():
        return None
    line = ["sbatch", "--parsable", f"--exclude={','.join(without)}", str(script)]
    try:
        job_info = subprocess.run(line, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return job_info.stdout.strip().partition(";")[0] if job_info.returncode == 0 else None


def _without(nodes: Sequence[str]) -> str:
    return f", without {', '.join(nodes)}" if nodes else ""


def _stop(options: argparse.Namespace, code: int, why: str) -> int:
    if options.chained:
        subprocess.run(["scancel", options.chained], check=False)
    return _say(code, f"exit code {code}: {why}; the job does not run again")


def _say(code: int, text: str) -> int:
    sys.stdout.write(f"[{now()}] {text}\n")
    return code


def _scontrol(*words: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(["scontrol", *words], capture_output=True, text=True, check=False)
    except OSError as error:
        return subprocess.CompletedProcess(words, 1, "", str(error))
