"""Runs a job from start to exit code."""

import logging
import sys
from contextlib import ExitStack
from functools import partial

from forge_ckpt.error import LockedError
from forge_config import ForgeError, Loaded
from forge_parallel.capabilities import flight_record
from forge_parallel.env import Env
from forge_resilience.exit_codes import ExitCode
from forge_resilience.signals import Signals
from forge_resilience.verdict import Verdict, agree
from forge_resilience.watchdog import Watchdog

from forge_trainer.build import build
from forge_trainer.clock import Clock
from forge_trainer.config.job import Job
from forge_trainer.console import emit
from forge_trainer.end_together import FailedElsewhere
from forge_trainer.plan.at_start import StartPlan
from forge_trainer.recovery.incidents import note_incident
from forge_trainer.report.announce import announcement
from forge_trainer.run import Run
from forge_trainer.run_dir.claim import Claim
from forge_trainer.run_dir.files import RunFiles


def run_job(
    loaded: Loaded[Job],
    rank: int,
    signals: Signals | None = None,
    change: bool = False,
    start_plan: StartPlan | None = None,
) -> ExitCode:
    """Start or continue a run. Collective.

    Args:
        loaded: the configuration.
        rank: rank of this process; only the first rank prints.
        signals: the signal handlers, entered by the command; by default the run makes its own.
        change: whether keys that may change as a recorded event may differ from those of the run.
        start_plan: the planned needs of the start, on the first rank; None on all ranks checks nothing.

    Raises:
        Stopped: a signal came before the first step.
    """
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    if signals is not None:
        signals.loaded()
    claim, clock = Claim(loaded, change), Clock()
    try:
        with ExitStack() as stack, clock.ending():
            signals = signals or stack.enter_context(Signals())
            watch(loaded.value, claim, clock, stack)
            if start_plan is not None:
                stack.callback(start_plan.close)
            with clock.span("build"):
                run = build(loaded.value, stack, signals, clock, claim, start_plan)
            claim.progress = run.progress
            signals.started(partial(agree, group=run.mesh.control_group))
            if rank == 0:
                planned = [] if start_plan is None else start_plan.lines()
                emit(announcement(run, claim.changes, loaded.unused, planned), sys.stdout)
                if start_plan is not None:
                    start_plan.keep(RunFiles(run.directory).plan)
                if claim.changes and run.progress.complete:
                    claim.begin(run.progress.step)  # there is no step to do it
            code, reason = _outcome(run, run.train(), claim)
            claim.ended(code, reason, run.progress.step)
    except LockedError as error:
        emit(f"rank {rank}: {error}\n", sys.stderr)
        return ExitCode.LOCKED
    except FailedElsewhere as error:
        emit(f"rank {rank} ends, as another rank failed: {error}\n", sys.stderr)
        return error.code
    except ForgeError as error:
        emit(f"rank {rank}: {type(error).__name__}: {error}\n", sys.stderr)
        return ExitCode.CONFIG
    if rank == 0 and code is not ExitCode.DONE:
        emit(f"{reason}\n", sys.stderr)
    return code


def watch(job: Job, claim: Claim, clock: Clock, stack: ExitStack) -> None:
    """Start a watchdog that follows the clock and ends this process when something hangs."""
    config, env = job.resilience, Env.detect()
    if not config.watchdog:
        return
    watchdog = stack.enter_context(
        Watchdog(
            RunFiles(job.job.directory).hang,
            env.rank,
            env.world_size,
            config.hang_least_s,
            config.hang_first_s,
            flight_record,
            claim.end_at_once,
        )
    )
    clock.watchers.append(watchdog.enter)
    clock.listeners.append(watchdog.learn)


def _outcome(run: Run, verdict: Verdict, claim: Claim) -> tuple[ExitCode, str]:
    """Return the exit code of a run and its reason."""
    step = run.progress.step
    if verdict == Verdict.ABORT and not claim.is_held():
        return ExitCode.LOCKED, f"stopped at step {step}: another process took {run.directory} over"
    if verdict == Verdict.ABORT and (trouble := run.recovery.trouble) is not None:
        if run.env.rank == 0:
            facts = {"step": step, "first": trouble.first, "end": trouble.end, "why": trouble.why}
            note_incident(run.directory, "ended", facts)
        return trouble.code, f"stopped at step {step}: {trouble.why}"
    if run.progress.complete:
        return ExitCode.DONE, "complete"
    if run.checkpoints.failed:  # a new start may not have this error; starts that all have it come to an end
        return ExitCode.FAILED, f"stopped at step {step} WITHOUT a checkpoint, which could not be written"
    return ExitCode.PREEMPTED, f"stopped at step {step} with a checkpoint; the same command continues it"
