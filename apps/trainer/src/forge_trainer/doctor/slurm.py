"""Checks of the settings of SLURM."""

import os
import re
import shutil
import subprocess

from forge_trainer.doctor.finding import Finding, fine, skipped

KILL_WAIT_S = 30


def slurm_findings() -> list[Finding]:
    """Check version, requeueing, and the time of a job between TERM and KILL."""
    if shutil.which("scontrol") is None:
        return [skipped("SLURM", "no scontrol here")]
    try:
        shown = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return [Finding("SLURM", "warning", "does not answer", "jobs cannot be submitted", "try again later")]
    settings = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", shown.stdout, re.MULTILINE))
    if not settings:
        return [skipped("SLURM", shown.stderr.strip().splitlines()[-1] if shown.stderr else "no settings")]
    job = os.environ.get("SLURM_JOB_ID")
    where = f", inside job {job}" if job else ""
    return [
        fine("SLURM", settings.get("SLURM_VERSION", "?") + where),
        _requeue(settings),
        _kill_wait(settings),
    ]


def _requeue(settings: dict[str, str]) -> Finding:
    if settings.get("JobRequeue") == "0":
        why = "jobs are not put back into the queue unless they ask for it, and some sites forbid that"
        return Finding("requeue", "warning", "JobRequeue = 0", why, 'again = "chain" in the cluster file')
    return fine("requeue", f"JobRequeue = {settings.get('JobRequeue', '?')}")


def _kill_wait(settings: dict[str, str]) -> Finding:
    """Check the seconds from TERM to KILL at preemption without grace time, scancel and the time limit."""
    seconds = int(re.match(r"\d+", settings.get("KillWait", "0")).group())  # type: ignore[union-attr]
    if seconds < KILL_WAIT_S:
        why = "a save that takes longer is lost when the job is preempted without grace time"
        return Finding("KillWait", "warning", f"{seconds} s", why, "save more often (checkpoint.every_steps)")
    return fine("KillWait", f"{seconds} s")
