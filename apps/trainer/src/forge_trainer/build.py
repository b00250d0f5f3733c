"""From a job to a run: the recipe, top to bottom."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from forge_ckpt.state import TrainState
from forge_ckpt.store import Store
from forge_data.loader import Loader, build_loader
from forge_parallel.apply import materialize, parallelize
from forge_parallel.capabilities import without_dynamo
from forge_parallel.env import Env, process_group
from forge_parallel.mesh import Mesh, build_mesh
from forge_parallel.plan import Plan
from forge_parallel.tensor import local_shard
from forge_resilience.signals import Signals
from forge_resilience.verdict import Verdict, agree
from torch import nn

from forge_trainer.clock import Clock
from forge_trainer.evaluate import evaluate
from forge_trainer.guards import Guard, build_guards
from forge_trainer.hooks import Hook
from forge_trainer.hooks.evaluate import Evaluate
from forge_trainer.hooks.log import Log
from forge_trainer.job import Job
from forge_trainer.loop import train
from forge_trainer.progress import Progress
from forge_trainer.step import Step, TextStep
from forge_trainer.track import Tracker
from forge_trainer.track.open import open_trackers
from forge_trainer.weights import fill, resume, saver


@dataclass
class Run:
    """Everything a run is made of.

    Attributes:
        job: the configuration.
        directory: where it writes.
        env: the place of this process.
        mesh: the grid of ranks.
        model: sharded and filled.
        step: one optimizer step.
        loader: training data.
        progress: how far it has come.
        hooks: what observes it.
        guards: what may stop it.
        save: writes a checkpoint.
        trackers: where metrics go; empty on all ranks but the first.
        clock: pauses while hooks look at the model.
    """

    job: Job
    directory: Path
    env: Env
    mesh: Mesh
    model: nn.Module
    step: Step
    loader: Loader
    progress: Progress
    hooks: list[Hook]
    guards: list[Guard]
    save: Callable[[Progress], None]
    trackers: list[Tracker]
    clock: Clock

    def train(self) -> Verdict:
        """Train to the end, or until a guard stops the run. Collective."""
        return train(
            self.step,
            iter(self.loader),
            self.progress,
            self.job.train.steps,
            self.hooks,
            self.guards,
            partial(agree, group=self.mesh.control_group),
            self.save,
        )


def build(job: Job, stack: ExitStack, signals: Signals | None = None) -> Run:
    """Make a run, continued from its newest checkpoint if it has one. Collective.

    Args:
        job: the configuration.
        stack: what the run opens is closed with it.
        signals: entered; without it the run makes its own.
    """
    signals = signals or stack.enter_context(Signals())
    env = Env.detect()
    device = env.device
    stack.enter_context(process_group(env, needed=job.precision.needs_group(device.type)))
    mesh = build_mesh(job.mesh, env)

    with torch.device("meta"):
        model = job.model.build()
    plan = Plan.of(model)
    parallelize(model, mesh, plan, job.parallel)
    materialize(model, device)
    fill(model, job)

    with without_dynamo():
        optimizer = job.optimizer.build(model.named_parameters())
    loss_fn = job.loss.build()
    checkpoint = job.checkpoint
    store = Store(
        job.job.directory / "checkpoints",
        checkpoint.keep,
        checkpoint.keep_every_steps,
        mesh.control_group,
        partial(local_shard, mesh=mesh),
    )
    data = partial(
        build_loader,
        job.data,
        rank=mesh.batch.rank,
        world_size=mesh.batch.size,
        micro_batch=job.train.micro_batch,
    )
    state = TrainState(model, optimizer)
    progress, fingerprint = resume(store, state)
    loader = data("train", global_batch=job.train.global_batch, first_sample=progress.samples)
    loader.require(fingerprint)

    step = TextStep(
        model=model,
        loss_fn=loss_fn,
        optimizer=optimizer,
        lr_factor=partial(job.schedule.factor, steps=job.train.steps),
        progress=progress,
        mesh=mesh,
        device=device,
        seed=job.job.seed,
        clip_norm=job.train.clip_norm,
    )
    clock = Clock()
    trackers = open_trackers(job, progress.step, stack) if env.rank == 0 else []
    guards, deadline = build_guards(job, signals)
    save = saver(store, state, loader.fingerprint, clock, deadline)
    directory = job.job.directory
    run = Run(job, directory, env, mesh, model, step, loader, progress, [], guards, save, trackers, clock)
    validation = partial(evaluate, model, data("validation"), loss_fn, mesh, device)
    run.hooks.extend(_hooks(run, validation))
    for hook in run.hooks:
        stack.callback(hook.close)
    return run


def _hooks(run: Run, validation: Callable[[], dict[str, float]]) -> list[Hook]:
    """Logging (first rank only), evaluation, and the hooks of the user."""
    job = run.job
    hooks: list[Hook] = []
    if run.trackers:
        flops = job.model.flops_per_token(job.data.max_tokens)
        hooks.append(Log(job.train.log_every_steps, run.trackers, run.clock, flops, run.progress.tokens))
    hooks.append(Evaluate(job.eval.every_steps, validation, run.trackers, run.clock))
    return hooks + [config.build(run) for config in job.hooks.values()]
