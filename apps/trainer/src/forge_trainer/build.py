"""Builds a run from its configuration: the recipe, top to bottom."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from forge_ckpt.state import TrainState
from forge_parallel.apply import materialize, parallelize
from forge_parallel.capabilities import bind_to_cores, without_dynamo
from forge_parallel.env import Env, process_group
from forge_parallel.mesh import Mesh, build_mesh
from forge_parallel.plan import Plan
from forge_parallel.stages import keep_stage, stages_of
from forge_parallel.tensor import is_copy
from forge_parallel.topology import require_within_node
from forge_resilience.deadline import Deadline
from forge_resilience.signals import Signals
from torch import nn
from torch.optim import Optimizer

from forge_trainer.checkpoints.checkpoints import Checkpoints, Interval, resume_or_start
from forge_trainer.checkpoints.open import open_saver, open_store
from forge_trainer.clock import BUILD, Clock
from forge_trainer.config.job import Job
from forge_trainer.data.data import Data
from forge_trainer.end_together import EndTogether
from forge_trainer.guards.guards import NotFinite, SaveDue, Spikes, Stopping, TimeLimit
from forge_trainer.guards.lease import LeaseGuard
from forge_trainer.guards.replicas import compared
from forge_trainer.hooks.build import add_hooks
from forge_trainer.hooks.ledger import Ledger
from forge_trainer.optim import trainable
from forge_trainer.optim.groups import freeze
from forge_trainer.optim.nothing import NothingToTrain
from forge_trainer.plan.at_start import StartPlan
from forge_trainer.progress import Progress
from forge_trainer.randomness import attention_kernels, deterministic
from forge_trainer.recovery.recovery import Recovery
from forge_trainer.report.announce import layers_in_8_bits
from forge_trainer.run import Run
from forge_trainer.run_dir.claim import Claim, code_of
from forge_trainer.steps.unreached import tell_unreached
from forge_trainer.steps.update import Update
from forge_trainer.track.open import open_trackers


def build(
    job: Job,
    stack: ExitStack,
    signals: Signals | None = None,
    clock: Clock | None = None,
    claim: Claim | None = None,
    start_plan: StartPlan | None = None,
) -> Run:
    """Build a run; it continues from its newest checkpoint if it has one. Collective.

    Args:
        job: the configuration.
        stack: closes at its end all that the run opened.
        signals: the signal handlers, entered; by default the run makes its own.
        clock: a clock that runs since before the build; by default the run makes its own.
        claim: ensures that only this start writes to the run directory; by default nothing ensures it.
        start_plan: the memory and disk space that the start is planned to need.
    """
    signals, clock, env = signals or stack.enter_context(Signals()), clock or Clock(), Env.detect()
    config, directory = job.resilience, job.job.directory
    mesh, epoch = open_mesh(job, env, signals, claim, stack)
    if start_plan is not None:
        start_plan.require_room(mesh.control_group)
    parts = build_parts(job, mesh)
    optimizer = build_optimizer(job, parts, mesh)
    state, store = TrainState(parts, optimizer, is_copy), open_store(job, mesh, epoch)
    recovery = Recovery(config, directory, store, mesh.control_group)
    progress, fingerprint, counts, places = resume_or_start(store, state, parts, job)
    data = Data(job, mesh, progress, stack)
    data.open(recovery.data(job.data), fingerprint, places, partial(clock.enter, BUILD))
    update = build_update(job, parts, optimizer, mesh, progress)
    step = job.step.build(parts, build_loss(job), mesh, seed=job.job.seed, update=update)
    trackers = open_trackers(job, progress, stack) if env.rank == 0 else []
    deadline = Deadline(config.max_runtime_s, config.save_margin_s)
    ledger = Ledger(directory, clock, progress, deadline.needed_s) if trackers else None
    saver = open_saver(job, store, state, deadline, clock, stack)
    interval = Interval(job.checkpoint, progress, mesh.control_group, ledger)
    finite = NotFinite(config, recovery, optimizer, mesh.control_group)
    # of trouble that several find at once, that of the first counts
    guards = [SaveDue(), Stopping(signals), TimeLimit(deadline)]
    guards += compared(config.compare_copies_every_steps, parts, mesh, recovery, progress)
    guards += [finite, Spikes(config, recovery)]
    guards += [LeaseGuard(claim)] if claim is not None and env.rank == 0 else []
    checkpoints = Checkpoints(store, state, saver, interval)
    run = Run(
        job, env, mesh, parts, optimizer, step, progress, data,
        guards, recovery, checkpoints, trackers, clock, stack,
    )  # fmt: skip
    add_hooks(run, finite.skipped, ledger, claim)
    run.load_counts(counts)
    return run


def open_mesh(
    job: Job, env: Env, signals: Signals, claim: Claim | None, stack: ExitStack
) -> tuple[Mesh, int | None]:
    """Build the grid of ranks; return it and the number of the lease under which they write. Collective."""
    job.require_layout(env.world_size)
    if job.fp8.recipe != "none":
        with torch.device("meta"):
            layers_in_8_bits(job, job.model.build())
    bind_to_cores(env.device, job.job.numa)
    stack.enter_context(deterministic(job.job.deterministic))
    stack.enter_context(attention_kernels(job.job.attention_kernels))
    together = stack.enter_context(EndTogether(signals, env))
    needed = job.parallel.needs_group(env.device.type)
    stack.enter_context(process_group(env, needed, job.resilience.collective_timeout_s, job.process_group))
    stack.enter_context(together.inside())
    mesh = build_mesh(job.mesh, env)
    require_within_node(mesh, job.process_group.within_node)
    epoch = None if claim is None else stack.enter_context(claim.hold(mesh.control_group))
    stack.enter_context(together.telling(code_of))
    return mesh, epoch


def build_parts(job: Job, mesh: Mesh) -> list[nn.Module]:
    """Build this rank's parts of the model, parallelized, on its device, with no values yet. Collective."""
    return [materialize(part, mesh.device) for part in parallel_parts(job, mesh)]


def parallel_parts(
    job: Job, mesh: Mesh, prepare: Callable[[int, nn.Module], None] | None = None
) -> list[nn.Module]:
    """Build this rank's parts of the model, parallelized, on the meta device. Collective.

    Args:
        job: the configuration.
        mesh: the grid of ranks.
        prepare: called with the number of each part and the part, before the part is parallelized.
    """
    parts: list[nn.Module] = []
    for number, stage in enumerate(stages_of(mesh.pipeline.rank, mesh.pipeline.size, job.pipeline)):
        with torch.device("meta"):
            model = job.model.build()
        freeze(model, job.optimizer_by_steps.groups, job.data.sources)
        keep_stage(model, Plan.of(model), stage, mesh.pipeline.size, job.pipeline)
        if prepare is not None:
            prepare(number, model)
        parts.append(parallelize(model, mesh, Plan.of(model), job.parallel))
    return parts


def build_optimizer(job: Job, parts: list[nn.Module], mesh: Mesh) -> Optimizer:
    """Build the optimizer of this rank's trained parameters."""
    with without_dynamo():
        found, rules = trainable(parts), job.optimizer_by_steps
        return rules.build(found, mesh) if found else NothingToTrain(rules.lr)


def build_update(
    job: Job, parts: list[nn.Module], optimizer: Optimizer, mesh: Mesh, progress: Progress
) -> Update:
    """Build the update of the weights, at the learning rates of a run that ends at `progress.until`."""

    def lr_factor(step: int) -> float:
        return job.lr_factor(step, progress.until)

    on_first_step, norm = partial(tell_unreached, parts, mesh), job.train.clip_norm
    return Update(
        parts, optimizer, lr_factor, norm, mesh, job.optimizer.ema_decay, on_first_step=on_first_step
    )


def build_loss(job: Job) -> Callable[..., Any]:
    """Build the loss; its chunks are compiled if the blocks are and the loss supports it."""
    loss = job.loss.build()
    if job.compile.enabled and hasattr(loss, "compile_chunks"):
        loss.compile_chunks(job.compile.backend)  # type: ignore[attr-defined]
    return loss
