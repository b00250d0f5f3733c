"""Runs a job from start to exit code."""

import logging
import sys
from contextlib import ExitStack
from functools import partial

from forge_ckpt.error import CheckpointError
from forge_config import Loaded
from forge_data.error import DataError
from forge_model.error import ModelError
from forge_parallel.error import ParallelError
from forge_resilience.exit_codes import ExitCode
from forge_resilience.signals import Signals
from forge_resilience.verdict import Verdict, agree

from forge_trainer.build import build
from forge_trainer.clock import Clock
from forge_trainer.job import Job
from forge_trainer.run_dir import describe


def run_job(loaded: Loaded[Job], rank: int, signals: Signals | None = None) -> ExitCode:
    """Start or continue a run. Collective.

    Args:
        loaded: the configuration; `require_same_job` has seen it.
        rank: of this process; the first one writes what describes the run.
        signals: entered by the command; without it the run makes its own.

    Raises:
        Stopped: a signal came before the first step.
    """
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    job, clock = loaded.value, Clock()
    if rank == 0:
        describe(job, loaded.imports)
    try:
        with ExitStack() as stack:
            signals = signals or stack.enter_context(Signals())
            with clock.span("build"):
                run = build(job, stack, signals, clock)
            signals.started(partial(agree, group=run.mesh.control_group))
            verdict = run.train()
    except (DataError, ModelError, ParallelError, CheckpointError) as error:
        sys.stderr.write(f"rank {rank}: {type(error).__name__}: {error}\n")
        return ExitCode.CONFIG
    if run.progress.step >= job.train.steps and verdict < Verdict.ABORT:
        return ExitCode.DONE
    if verdict == Verdict.ABORT:
        sys.stderr.write(
            f"stopped at step {run.progress.step}: too many steps in a row were not finite "
            f"(resilience.max_bad_steps = {job.resilience.max_bad_steps})\n"
        )
        return ExitCode.NOT_FINITE
    if rank == 0:
        sys.stderr.write(
            f"stopped at step {run.progress.step} with a checkpoint; the same command continues it\n"
        )
    return ExitCode.PREEMPTED
