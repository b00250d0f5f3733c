"""What follows the end of a job: again, or not. Runs in the batch script, without torch."""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from forge_ckpt.store import Store
from forge_resilience.exit_codes import ExitCode

from forge_trainer.run_dir import RunFiles, now, read_ended
from forge_trainer.slurm.futile import FUTILE, futile_starts
from forge_trainer.slurm.script import LOGS
from forge_trainer.slurm.suspects import suspect_of, suspects

FINAL = {ExitCode.DONE, ExitCode.CONFIG, ExitCode.NOT_FINITE, ExitCode.DIVERGED}
"""After these a new start would end the same way."""


def after_job(options: argparse.Namespace) -> int:
    """`forge after`: put the job back into the queue if that helps.

    Returns:
        0 when the run is complete or goes on; else the code that says why not.
    """
    directory = Path(options.directory)
    code = _code(directory, options.code)
    try:
        failures = _remember(directory, code)
    except OSError as error:  # without memory, a job that fails at once would run again for ever
        return _stop(options, code, f"{directory} cannot be written: {error}")
    state = _job_state()
    if state == "CANCELLED":
        return _stop(options, code, "cancelled")
    if state not in ("", "RUNNING"):
        return _say(code, f"exit code {code}: SLURM ends this job by itself ({state})")
    if code in FINAL:
        return _stop(options, code, "complete" if code == ExitCode.DONE else "a human must look at it")
    if failures >= FUTILE:
        return _stop(options, ExitCode.CRASH_LOOP, f"{failures} starts failed without a new checkpoint")
    if options.never:
        return _stop(options, code, "the cluster file says never again")
    if options.chained:
        without = suspects(directory)
        if without:
            _scontrol("update", f"JobId={options.chained}", f"ExcNodeList={','.join(without)}")
        return _say(ExitCode.DONE, f"exit code {code}; job {options.chained} goes on{_without(without)}")
    return _requeue(code, directory)


def _code(directory: Path, of_step: int) -> int:
    """The exit code of the run if this start has left one: srun gives the highest of all ranks."""
    ended = read_ended(directory)
    this = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    if ended is None or (ended.get("job"), ended.get("restart")) != this:
        return of_step
    return int(ended["code"])


def _remember(directory: Path, code: int) -> int:
    """Add this end to `starts.jsonl`; how many failed in a row without getting further."""
    path = RunFiles(directory).starts
    steps = Store(RunFiles(directory).checkpoints).steps()
    step = steps[-1] if steps else 0
    failed = code not in (ExitCode.DONE, ExitCode.PREEMPTED)
    earlier = futile_starts(directory)
    futile = 1 + (len(earlier) if earlier and earlier[0]["step"] == step else 0) if failed else 0
    line = {
        "when": now(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
        "nodes": os.environ.get("SLURM_JOB_NODELIST"),
        "code": int(code),
        "suspect": suspect_of(read_ended(directory) if code == ExitCode.HUNG else None),
        "failed": failed,
        "step": step,
    }
    directory.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return futile


def _job_state() -> str:
    """What SLURM says of this job: RUNNING, CANCELLED, or COMPLETING when it ends it; empty without SLURM."""
    told = _scontrol("show", "job", os.environ.get("SLURM_JOB_ID", ""))
    found = re.search(r"JobState=(\w+)", told.stdout)
    return found[1] if found else ""


def _requeue(code: int, directory: Path) -> int:
    job = os.environ.get("SLURM_JOB_ID", "")
    told = _scontrol("show", "job", job).stdout
    if "BatchFlag=1" not in told:
        return _say(code, f"exit code {code}; this is no batch job: start it again by hand")
    known = re.search(r"ExcNodeList=(\S+)", told)
    without = suspects(directory)
    if set(without) - set(known[1].split(",") if known else []) and (new := _submit(directory, without)):
        return _say(ExitCode.DONE, f"exit code {code}; job {new} takes its place{_without(without)}")
    told = _scontrol("requeue", job)
    if told.returncode:
        # In a preemption SLURM does it by itself, and refuses to do it twice.
        return _say(code, f"exit code {code}; not put back into the queue: {told.stderr.strip()}")
    return _say(ExitCode.DONE, f"exit code {code}; job {job} is back in the queue")


def _submit(directory: Path, without: Sequence[str]) -> str | None:
    """The id of a new job from the same script; None if there is none.

    The nodes of a job that runs, or was put back by its own script, cannot be changed (SLURM 22.05).
    """
    script = directory.parent / LOGS / f"{directory.name}.sh"
    if "SLURM_ARRAY_JOB_ID" in os.environ or not script.exists():
        return None
    line = ["sbatch", "--parsable", f"--exclude={','.join(without)}", str(script)]
    try:
        told = subprocess.run(line, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return told.stdout.strip().partition(";")[0] if told.returncode == 0 else None


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
