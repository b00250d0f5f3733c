"""From a job to a run: the recipe, top to bottom."""

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forge_ckpt.saver import Saver
from forge_ckpt.state import TrainState
from forge_ckpt.store import Store
from forge_data.loading.loader import Loader
from forge_parallel.apply import materialize, parallelize
from forge_parallel.capabilities import bind_to_cores, host_group, without_dynamo
from forge_parallel.env import Env, process_group
from forge_parallel.mesh import Mesh, build_mesh
from forge_parallel.plan import Plan
from forge_parallel.stages import keep_stage, stages_of
from forge_parallel.tensor import local_shard
from forge_resilience.deadline import SAVE, Deadline
from forge_resilience.signals import Signals
from forge_resilience.verdict import Verdict, agree
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from forge_trainer.announce import layers_in_8_bits
from forge_trainer.claim import code_of
from forge_trainer.clock import BETWEEN, BUILD, Clock
from forge_trainer.evaluations import open_evaluations
from forge_trainer.go_back import GoBack, Unfit, open_data
from forge_trainer.guards import Count, Guard, Judges, build_guards
from forge_trainer.hooks import Hook
from forge_trainer.hooks.collectives import CheckCollectives, groups_of
from forge_trainer.hooks.copies import build_copies
from forge_trainer.hooks.evaluate import Evaluate
from forge_trainer.hooks.figures import frozen_parts
from forge_trainer.hooks.ledger import Ledger
from forge_trainer.hooks.log import Log
from forge_trainer.hooks.speed import CompareSpeed
from forge_trainer.hooks.tasks import EvaluateTasks
from forge_trainer.job import Job
from forge_trainer.ladder import Ladder
from forge_trainer.loop import train
from forge_trainer.optim import trainable
from forge_trainer.optim.averaged import evaluation_weights
from forge_trainer.optim.groups import freeze
from forge_trainer.optim.nothing import NothingToTrain
from forge_trainer.progress import Progress, Stateful
from forge_trainer.randomness import attention_kernels, deterministic
from forge_trainer.rollback import Rollbacks, note_incident
from forge_trainer.run_dir import RunFiles
from forge_trainer.saves import Saves
from forge_trainer.say import say
from forge_trainer.steps.base import Step
from forge_trainer.steps.repeated import Repeated, meaning_of_repetition
from forge_trainer.steps.unreached import tell_unreached
from forge_trainer.steps.update import Update
from forge_trainer.together import EndTogether
from forge_trainer.track import Tracker
from forge_trainer.track.numbers import numbers
from forge_trainer.track.open import open_trackers
from forge_trainer.weights import SaveRun, resume_or_start


@dataclass
class Run:
    """Everything a run is made of; hooks see it as a `RunView`.

    Attributes:
        job: the configuration.
        directory: where it writes.
        env: the place of this process.
        mesh: the grid of ranks.
        parts: the parts of the model that this rank holds, sharded and with their values.
        optimizer: of the parts.
        step: trains and evaluates.
        loader: training data.
        progress: how far it has come.
        hooks: what observes it.
        guards: what may stop it.
        save: writes a checkpoint.
        trackers: where metrics go; empty on all ranks but the first.
        clock: where the time goes.
        ladder: what follows trouble.
        go_back: takes the run back to before the trouble; False where there is nothing to go back to.
    """

    job: Job
    directory: Path
    env: Env
    mesh: Mesh
    parts: list[nn.Module]
    optimizer: Optimizer
    step: Step
    loader: Loader
    progress: Progress
    hooks: list[Hook]
    guards: list[Guard]
    save: SaveRun
    trackers: list[Tracker]
    clock: Clock
    ladder: Ladder
    go_back: Callable[["Run"], bool]

    def train(self) -> Verdict:
        """Train to the end, or until a guard stops the run; go back where there is trouble. Collective."""
        with self.clock.span(Hook.span):
            for hook in self.hooks:
                hook.on_start(self.progress)
        while (verdict := self._train()) is Verdict.ROLLBACK:
            with self.clock.span("rollback"):
                if not self.go_back(self):
                    verdict = Verdict.ABORT
                    break
        if verdict is Verdict.SAVE:  # of its last step: it is complete
            verdict = Verdict.CONTINUE
        with self.clock.span(Hook.span):
            for hook in self.hooks:
                hook.on_end(self.progress, verdict)
        return verdict

    def log(self, values: Mapping[str, Any]) -> None:
        """See `RunView.log`."""
        if self.trackers:
            at = {"step": self.progress.step, "tokens": self.progress.tokens}
            record = numbers(values) | at
            for tracker in self.trackers:
                tracker.log(record)

    def evaluated(self, progress: Progress, results: Mapping[str, float]) -> None:
        """Tell the hooks what an evaluation found."""
        for hook in self.hooks:
            hook.on_eval(progress, results)

    def _train(self) -> Verdict:
        config = self.job.resilience
        repeated = Repeated(self.step, config.check_every_steps, self._tell_of_repetition)
        verdict = train(
            repeated if config.repeat_bad_steps else self.step,
            self.job.batch_sizes.of_steps(self.loader, self.progress.step),
            self.progress,
            self.job.train.steps,
            self.hooks,
            self.guards,
            partial(agree, group=self.mesh.control_group),
            self.save,
            self.clock,
        )
        with self.clock.span("save"):
            self.save.finish(self.progress.step, self.job.train.steps)
        return verdict

    def _tell_of_repetition(self, step: int, finite: bool) -> None:
        """Say what it meant that a step was repeated; the first rank does."""
        if self.env.rank == 0:
            exact = self.job.job.deterministic or self.mesh.device.type == "cpu"
            means = meaning_of_repetition(finite, exact)
            say(f"step {step} was not finite, was repeated from the same inputs and {means}\n", sys.stderr)
            note_incident(self.directory, "repeated", {"step": step, "finite": finite, "exact": exact})


def build_loss(job: Job) -> Callable[..., Any]:
    """The loss, its chunks compiled where blocks are, if it knows how."""
    loss = job.loss.build()
    if job.compile.enabled and hasattr(loss, "compile_chunks"):
        loss.compile_chunks(job.compile.backend)  # type: ignore[attr-defined]
    return loss


def build(
    job: Job,
    stack: ExitStack,
    signals: Signals | None = None,
    clock: Clock | None = None,
    hold: Callable[[ProcessGroup | None], AbstractContextManager[int | None]] = lambda group: nullcontext(),
) -> Run:
    """Make a run, continued from its newest checkpoint if it has one. Collective.

    Args:
        job: the configuration.
        stack: what the run opens is closed with it.
        signals: entered; without it the run makes its own.
        clock: counts from before the build; without it the run makes its own.
        hold: given the control group, makes this start the only one that writes to the run directory; gives
            the number of its lease.
    """
    signals, clock = signals or stack.enter_context(Signals()), clock or Clock()
    env = Env.detect()
    job.require_layout(env.world_size)
    if job.fp8.recipe != "none":
        with torch.device("meta"):
            layers_in_8_bits(job, job.model.build())
    bind_to_cores(env.device, job.job.numa)
    stack.enter_context(deterministic(job.job.deterministic))
    stack.enter_context(attention_kernels(job.job.attention_kernels))
    together = stack.enter_context(EndTogether(signals, env))
    needed = job.parallel.needs_group(env.device.type)
    stack.enter_context(process_group(env, needed, job.resilience.collective_timeout_s))
    stack.enter_context(together.inside())
    mesh = build_mesh(job.mesh, env)
    epoch = stack.enter_context(hold(mesh.control_group))
    stack.enter_context(together.telling(code_of))

    parts = build_parts(job, mesh)
    with without_dynamo():
        found = trainable(parts)
        rules = job.optimizer_by_steps
        optimizer = rules.build(found, mesh) if found else NothingToTrain(rules.lr)
    state = TrainState(parts, optimizer)
    store = open_store(job, mesh, epoch)
    rollbacks = Rollbacks(job.job.directory, store, mesh.control_group)
    progress, fingerprint, counts, begins = resume_or_start(store, state, parts, job)
    loader = open_data(job, mesh, rollbacks, progress, fingerprint, begins, lambda: clock.enter(BUILD))
    stack.callback(loader.close)
    job = job.ending_at(loader.last_step)

    update = Update(
        parts,
        optimizer,
        job.lr_factor,
        job.train.clip_norm,
        mesh,
        job.optimizer.ema_decay,
        first=partial(tell_unreached, parts, mesh),
    )
    step = job.step.build(parts, build_loss(job), mesh, seed=job.job.seed, update=update)
    trackers = open_trackers(job, progress.step, stack) if env.rank == 0 else []
    saves = Saves(job.checkpoint, progress.step, lambda: run.job.train.steps, mesh.control_group)
    judges = build_guards(job, signals, rollbacks.taken, saves, lambda: run.job.train.steps)
    ladder, counters = judges.ladder, judges.counters()
    saver = open_saver(job, store, state, judges.deadline, clock, stack)
    copies = build_copies(job.resilience.compare_copies_every_steps, parts, mesh, ladder, progress.step)
    unfit = Unfit(store, ladder, optimizer, mesh, copies)
    save = SaveRun(
        saver, lambda: run.loader, counters, rollbacks.taken, unfit, saves.saved, lambda: run.hooks
    )
    back = GoBack(rollbacks, store, state, update, saves, counters, stack)
    run = Run(
        job, job.job.directory, env, mesh, parts, optimizer, step, loader, progress, [], judges.guards, save,
        trackers, clock, ladder, back,
    )  # fmt: skip
    weights = partial(evaluation_weights, job.optimizer, optimizer)
    run.hooks.extend([copies] if copies is not None else [])
    if (every := job.resilience.compare_speed_every_steps) and mesh.control_group is not None:
        run.hooks.append(CompareSpeed(every, run))
        run.hooks.extend([CheckCollectives(every, run)] if groups_of(mesh) else [])
    run.hooks.extend(build_hooks(run, judges, weights))
    load_counters(counters, counts, run)
    for hook in run.hooks:
        stack.callback(hook.close)
    return run


def load_counters(counters: dict[str, Stateful], counts: Mapping[str, Any], run: Run) -> None:
    """Add those of the hooks and the step, and let all go on from what a checkpoint tells.

    Args:
        counters: what is saved beside the weights, by name; added to.
        counts: of the checkpoint; of a counter without any it goes on from its beginning.
        run: complete.
    """
    counters |= {hook.span: hook for hook in run.hooks if isinstance(hook, Log)}
    counters |= {f"hooks.{h.name}": h for h in run.hooks if h.name and isinstance(h, Stateful)}
    counters |= {"step": run.step} if isinstance(run.step, Stateful) else {}
    for name in counters.keys() & counts.keys():
        counters[name].load_state(counts[name])


def build_parts(job: Job, mesh: Mesh) -> list[nn.Module]:
    """This rank's parts of the model, parallel and on its device, still without values. Collective."""
    parts: list[nn.Module] = []
    for stage in stages_of(mesh.pipeline.rank, mesh.pipeline.size, job.pipeline):
        with torch.device("meta"):
            model = job.model.build()
        freeze(model, job.optimizer_by_steps.groups, job.data.sources)
        keep_stage(model, Plan.of(model), stage, mesh.pipeline.size, job.pipeline)
        parallelize(model, mesh, Plan.of(model), job.parallel)
        parts.append(materialize(model, mesh.device))
    return parts


def open_store(job: Job, mesh: Mesh, epoch: int | None = None) -> Store:
    """The checkpoints of the run, with a group of their own: they are written beside training. Collective."""
    config, files = job.checkpoint, RunFiles(job.job.directory)
    group = host_group() if mesh.control_group is not None else None
    return Store(
        files.checkpoints,
        config.keep,
        config.keep_every_steps,
        group,
        partial(local_shard, mesh=mesh),
        files.lease,
        files.progress_marks,
        epoch,
        config.is_dense,
    )


def open_saver(
    job: Job, store: Store, state: TrainState, deadline: Deadline, clock: Clock, stack: ExitStack
) -> Saver:
    """What writes checkpoints; the deadline hears of its saves and of all that the clock measures."""
    clock.listeners.append(
        lambda name, s: deadline.observe(name, s) if name not in (BUILD, BETWEEN) else None
    )
    # twice: at a stop, one save may be in flight and the last one follows
    saver = Saver(store, state, job.checkpoint.asynchronous, lambda s: deadline.observe(SAVE, 2 * s))
    stack.callback(saver.close)
    return saver


def build_hooks(
    run: Run,
    judges: Judges,
    weights: Callable[[], AbstractContextManager[None]],
) -> list[Hook]:
    """Logging (first rank only), evaluation if there is text for it, the hooks of the user. Collective."""
    job = run.job
    hooks: list[Hook] = [Count(judges.finite, judges.spikes)]
    frozen = frozen_parts(run.parts, run.mesh)
    if run.trackers:

        def tokens_read(samples: int) -> dict[str, int]:
            return run.loader.tokens_read(samples)

        ledger = Ledger(run.directory, run.clock, run.progress, judges.deadline.needed_s)
        judges.saves.mean_time_to_failure_s = lambda: ledger.mean_time_to_failure_s
        skipped, every = judges.finite.skipped, job.train.log_every_steps
        hooks += [ledger, Log(every, run, skipped, tokens_read, lambda: ledger.ratio, frozen)]
    if job.eval.every_steps:
        sets = open_evaluations(job, run.mesh, lambda: run.clock.enter(BUILD))
        hooks += [Evaluate(job.eval.every_steps, run, sets, weights, run.evaluated)] if sets else []
        if not sets and run.env.rank == 0:
            say("no source has text for validation: this run is not evaluated\n", sys.stderr)
        hooks += build_tasks(run, weights)
    for name, config in job.hooks.items():
        hooks.append(config.build(run))
        hooks[-1].name = name
    return hooks


def build_tasks(run: Run, weights: Callable[[], AbstractContextManager[None]]) -> list[Hook]:
    """The evaluation on tasks, if any is asked for. Collective."""
    config, every = run.job.eval.tasks, run.job.eval.every_steps
    if config is None:
        return []
    # the harness is an extra, and slow to load
    from forge_trainer.tasks_while_training import Tasks

    return [EvaluateTasks(config.every_steps or every, run, Tasks(config, run), weights, run.evaluated)]
