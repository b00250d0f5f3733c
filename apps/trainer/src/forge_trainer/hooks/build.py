"""Builds the hooks of a run: the built-in ones and the user's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from forge_trainer.clock import BUILD
from forge_trainer.console import emit
from forge_trainer.data.evaluation_sets import open_evaluations
from forge_trainer.hooks.base import Hook
from forge_trainer.hooks.collectives import CheckCollectives, groups_of
from forge_trainer.hooks.evaluate import Evaluate
from forge_trainer.hooks.figures import frozen_parts
from forge_trainer.hooks.ledger import Ledger
from forge_trainer.hooks.log import Log
from forge_trainer.hooks.speed import CompareSpeed
from forge_trainer.hooks.tasks import EvaluateTasks
from forge_trainer.optim.averaged import evaluation_weights
from forge_trainer.progress import Progress
from forge_trainer.run_dir.claim import Claim, FirstStep

if TYPE_CHECKING:
    from forge_trainer.run import Run

OnResults = Callable[[Progress, Mapping[str, float]], None]


def add_hooks(run: Run, skipped: Callable[[], int], ledger: Ledger | None, claim: Claim | None) -> None:
    """Add comparison of ranks, logging (first rank only), evaluation and the user's hooks. Collective.

    Args:
        run: the run, still without hooks.
        skipped: returns the number of steps of the run that were not finite.
        ledger: the ledger, on the first rank.
        claim: writes the configuration after the first step.
    """
    job = run.job

    def on_results(progress: Progress, results: Mapping[str, float]) -> None:
        for hook in run.hooks:
            hook.on_eval(progress, results)

    def add(*hooks: Hook) -> None:
        for hook in hooks:
            run.hooks.append(hook)
            run.stack.callback(hook.close)  # at once: the next one may fail to be built

    if (every := job.resilience.compare_speed_every_steps) and run.mesh.control_group is not None:
        add(CompareSpeed(every, run))
        add(*[CheckCollectives(every, run)] if groups_of(run.mesh) else [])
    frozen, every = frozen_parts(run.parts, run.mesh), job.train.log_every_steps
    if ledger is not None:
        log = Log(every, run, skipped, frozen, run.data.tokens_read, lambda: ledger.ratio)
        add(ledger, log)
    if job.eval.every_steps:
        add(*_evaluations(run, partial(evaluation_weights, job.optimizer, run.optimizer), on_results))
    for name, config in job.hooks.items():
        hook = config.build(run)
        hook.name = name
        add(hook)
    add(*[FirstStep(claim)] if claim is not None and run.env.rank == 0 else [])


def _evaluations(
    run: Run, weights: Callable[[], AbstractContextManager[None]], on_results: OnResults
) -> list[Hook]:
    """Build the evaluations on text, if there is any, and on tasks, if configured. Collective."""
    every, tasks = run.job.eval.every_steps, run.job.eval.tasks
    sets, lacks = open_evaluations(run.job, run.mesh, partial(run.clock.enter, BUILD))
    hooks: list[Hook] = [Evaluate(every, run, sets, weights, on_results)] if sets else []
    if run.env.rank == 0 and (lacks or not sets):
        why = "; ".join(lacks) or "no source has text for validation"
        emit(f"{why}\nthis run is {'evaluated without it' if sets else 'not evaluated'}\n", sys.stderr)
    if tasks is not None:
        # the harness is an extra, and slow to load
        from forge_trainer.hooks.harness import Tasks

        hooks.append(EvaluateTasks(tasks.every_steps or every, run, Tasks(tasks, run), weights, on_results))
    return hooks
