"""Announces a start: model, layout, data and schedule, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from forge_config import Change, plain
from forge_config.registry import type_name
from torch import nn

from forge_trainer.optim.groups import listed, unfed
from forge_trainer.report.scaled import scaled as scaled

if TYPE_CHECKING:
    from forge_trainer.config.job import Job
    from forge_trainer.run import Run


def announcement(
    run: Run, changes: Sequence[Change], unused: Sequence[str] = (), planned: Sequence[str] = ()
) -> str:
    """Return the text of a start: parameters, tokens, FLOPs, optimizer, layout, place and first step.

    Args:
        run: the run.
        changes: changes of its configuration at this start.
        unused: see `Loaded.unused`.
        planned: lines about the planned needs of the start.
    """
    return "\n".join([*_lines(run, changes), *planned, *unused_lines(unused)]) + "\n"


def unused_lines(unused: Sequence[str]) -> list[str]:
    """Return lines about keys of lower layers that a different `type` makes useless."""
    return [f"  not used   {one}: of another type than the one that was chosen" for one in unused]


def optimizer_line(job: Job, steps: int) -> str:
    """Return a line with optimizer, schedule and their main settings."""
    optimizer, schedule = job.optimizer, job.schedule
    warmup = schedule.warmup(steps, job.step_tokens)
    unit = "step" if warmup == 1 else "steps"
    return (
        f"  optimizer  {type_name(type(optimizer))}, lr {optimizer.lr:g}, weight_decay "
        f"{optimizer.weight_decay:g}; {type_name(type(schedule))} after {warmup:,} {unit} of warm-up"
    )


def _lines(run: Run, changes: Sequence[Change]) -> Iterator[str]:
    job, steps = run.job, run.progress.until
    with torch.device("meta"):
        model = job.model.build()
    parameters, active, idle = _parameters(run, model)
    of_which = "" if active == parameters else f", {scaled(active).strip()} active"
    tokens = job.batch_sizes.samples(steps) * job.data.max_tokens
    batches = " to ".join(map(str, job.batch_sizes.all()))
    flops = job.model.flops_per_token(job.data.max_tokens) * tokens
    yield f"{job.job.name}"
    yield f"  model      {scaled(parameters)} parameters ({parameters:,}){of_which}"
    yield (
        f"  training   {steps:,} steps of {batches} x {job.data.max_tokens} tokens: "
        f"{scaled(tokens)} tokens, {tokens / parameters:.3g} a parameter"
    )
    yield f"  compute    {scaled(flops)}FLOPs in all, {scaled(flops / steps)}FLOPs a step"
    if unbalanced(plain(job.model)):
        yield "  experts    have no balance loss, and a few may take all tokens: router.batch_balance_weight"
    if idle:
        yield f"  frozen     {', '.join(idle)}: no source has what they are given"
    yield optimizer_line(job, steps)
    if job.fp8.recipe != "none" and (layers := layers_in_8_bits(job, model)):
        yield f"  8 bits     {len(layers)} linear layers: {', '.join(listed(layers))}"
    yield f"  layout     {_layout(run)}"
    for line in run.data.loader.plan:
        yield f"  data       {line}"
    yield f"  writes to  {run.directory}"
    for change in changes:
        yield f"  changes    {change}"
    if run.progress.complete:
        yield f"  complete   all {run.progress.step} steps are done"
    elif run.progress.step:
        yield f"  goes on    from the checkpoint of step {run.progress.step:,}"
    else:
        origins = " and ".join(job.train.origins.values())
        weights = f"the weights of {origins}" if origins else f"seed {job.job.seed}"
        yield f"  begins     at step 0, with {weights}"


def unbalanced(tree: Any) -> bool:
    """Return whether the keys of a model contain a router of softmax scores without balance loss."""
    if isinstance(tree, list):
        return any(map(unbalanced, tree))
    if not isinstance(tree, dict):
        return False
    router = tree.get("router")
    if isinstance(router, dict) and router.get("type", "softmax") == "softmax":
        return tree.get("num_experts", 0) > 1 and not (
            router.get("batch_balance_weight") or router.get("sequence_balance_weight")
        )
    return any(map(unbalanced, tree.values()))


def _parameters(run: Run, model: nn.Module) -> tuple[int, int, list[str]]:
    """Count parameters and active parameters of the whole model; list the parts that no source feeds."""
    total = sum(parameter.numel() for parameter in model.parameters())
    active = getattr(model, "active_parameters", lambda: total)
    return total, active(), unfed(model, run.job.data.sources)  # type: ignore[operator]


def layers_in_8_bits(job: Job, model: nn.Module) -> list[str]:
    """List the names of the linear layers of a whole model that multiply in 8 bits.

    Raises:
        ParallelError: tensor parallelism would cut a layer to a size that such products do not support.
    """
    from forge_parallel.fp8 import eight_bit_layers
    from forge_parallel.plan import Plan

    return eight_bit_layers(model, Plan.of(model).flat(), job.fp8, job.mesh.tp)


def _layout(run: Run) -> str:
    job, env = run.job, run.env
    sizes = job.mesh.sizes(env.world_size)
    axes = " x ".join(f"{name} {size}" for name, size in sizes.items())
    axes += f", of which ep {job.mesh.ep}" if job.mesh.ep > 1 else ""
    ranks = "1 rank" if env.world_size == 1 else f"{env.world_size} ranks"
    micro = job.train.global_batch // (run.mesh.batch.size * job.train.micro_batch)
    compute = job.precision.compute_dtype(env.device.type)
    batches = f"{micro} x {job.train.micro_batch} sequences a rank"
    return f"{ranks} on {env.device.type} ({axes}), {batches}, {compute}"
