"""Computes the plan of a job as data: its needs and its speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from forge_model.roles import parameter_roles
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from forge_trainer.config.job import Job
from forge_trainer.optim.groups import freeze
from forge_trainer.plan import kinds
from forge_trainer.plan.batches import batch_on_paper
from forge_trainer.plan.devices import Device, Table, device_of
from forge_trainer.plan.estimate import Seconds, seconds
from forge_trainer.plan.places import Place
from forge_trainer.plan.stage import Stage, micro_batches_of, stage_on_paper, stages_on_paper
from forge_trainer.plan.trace import Site

GIB = 1 << 30
HOST_KINDS = (kinds.WEIGHTS, kinds.GRADIENTS, kinds.MOMENTS)
"""The kinds that `fsdp.offload` keeps in the memory of the host."""


class Counted(NamedTuple):
    """Parameters of the whole model.

    Attributes:
        total: number of parameters; shared ones count once.
        active: number of parameters that a token uses.
        trained: number of parameters that are ever trained.
        by_role: number of parameters of each role.
    """

    total: int
    active: int
    trained: int
    by_role: dict[str, int]


class Plan(NamedTuple):
    """The result of planning a job: memory, traffic, FLOPs and time.

    Attributes:
        job: the configuration.
        site: the machine.
        device_name: name of the device in the table, or `cpu`.
        device: the device; None for a CPU.
        parameters: parameters of the model.
        sizes: sizes of the axes of the mesh.
        micro_batches: number of micro-batches of a rank in a step.
        stages: the traced pipeline stages, each with one traced rank.
        peaks: for each stage, the place of the peak memory on the device, and its bytes by kind.
        host: bytes of each stage on the host, with `fsdp.offload`.
        flops: FLOPs of a step of the whole run, with the pairs of tokens that causal attention sees.
        flops_full: FLOPs of a step with all pairs of tokens.
        time: time of the slowest stage; None for a CPU.
        skewed: the stage with most experts if its rank serves twice as many rows; None without `ep`.
    """

    job: Job
    site: Site
    device_name: str
    device: Device | None
    parameters: Counted
    sizes: dict[str, int]
    micro_batches: int
    stages: list[Stage]
    peaks: list[tuple[Place, dict[str, float]]]
    host: list[float]
    flops: float
    flops_full: float
    time: Seconds | None
    skewed: Stage | None = None

    @property
    def memory_bytes(self) -> float:
        """The peak memory of a rank."""
        return max(sum(sizes.values()) for _, sizes in self.peaks)

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits into the memory of a device; None if that is unknown."""
        return None if self.device is None else self.memory_bytes <= self.device.memory_gib * GIB

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second of the whole run; None if unknown."""
        return None if self.time is None else self.job.step_tokens / self.time.likely

    def mfu(self, full: bool = False) -> float | None:
        """Return model FLOPs over the bfloat16 peak of all devices; None if unknown."""
        if self.time is None or self.device is None:
            return None
        flops = self.flops_full if full else self.flops
        return flops / self.time.likely / (self.site.ranks * self.device.tflops["bfloat16"] * 1e12)


def plan_of(
    job: Job,
    ranks: int,
    node_ranks: int | None,
    device_name: str,
    table: Table,
    *,
    whole: bool = False,
    skew: float | None = None,
) -> Plan:
    """Plan a job by running it on fake tensors.

    Args:
        job: the configuration.
        ranks: number of ranks of the job.
        node_ranks: ranks of a node; None for the number in the table.
        device_name: device of a rank.
        table: table of devices.
        whole: whether to run all blocks and micro-batches, also repeated ones.
        skew: also trace a rank whose experts serve so many times their even rows; None does not.

    Raises:
        ConfigError: there is no such device.
        ParallelError: the ranks do not fit the mesh of the job.
    """
    job.require_layout(ranks)
    device = device_of(table, device_name)
    site = Site(ranks, node_ranks or (device.node_ranks if device else 8), device is not None)
    sizes, count = job.mesh.sizes(ranks), micro_batches_of(job, ranks)
    stages = stages_on_paper(job, site, _numbers(sizes["pp"]), whole=whole)
    worst = [kinds.highest(stage.step.peaks) for stage in stages]
    peaks, host = _on_the_device(job, device, worst)
    time = None
    if device is not None:
        times = [seconds(s.step, job, device, table.efficiency, sizes["pp"], count) for s in stages]
        time = max(times, key=lambda one: one.likely)
    skewed = None
    if skew is not None and sizes["pp"] == 1 and job.mesh.ep > 1:
        skewed = stage_on_paper(job, site, 0, whole=whole, skew=skew)
    flops, flops_full = (model_flops(job, causal) for causal in (True, False))
    return Plan(
        job, site, device_name, device, counted(job), sizes, count, stages, peaks, host,
        flops, flops_full, time, skewed,
    )  # fmt: skip


def _numbers(stages: int) -> list[int]:
    """Return the pipeline ranks to trace: the first two and the last; the others are between them."""
    return sorted({0, 1, stages - 1} & set(range(stages)))


def _on_the_device(
    job: Job, device: Device | None, worst: Sequence[tuple[Place, Any]]
) -> tuple[list[tuple[Place, dict[str, float]]], list[float]]:
    """Return the bytes on the device at each place, and the bytes offloaded to the host."""
    if not job.fsdp.offload or device is None:
        return [(place, dict(sizes)) for place, sizes in worst], [0.0 for _ in worst]
    peaks = [(place, {k: v for k, v in sizes.items() if k not in HOST_KINDS}) for place, sizes in worst]
    return peaks, [sum(sizes[kind] for kind in HOST_KINDS) for _, sizes in worst]


def model_flops(job: Job, causal: bool) -> float:
    """Return the FLOPs of a step; images and frozen parts count as in the metric `mfu`."""
    with FakeTensorMode():
        (micro,) = batch_on_paper(job, 1)
    shapes = {name: tuple(tensor.shape) for name, tensor in micro.inputs.items()}
    often = job.train.global_batch / job.train.micro_batch
    return often * job.model.step_flops(shapes, causal, unmoved(_on_meta(job)))


def unmoved(model: nn.Module) -> set[str]:
    """Return the direct submodules of a model with parameters, none of which is trained."""
    return {
        name
        for name, child in model.named_children()
        if (parameters := [*child.parameters()]) and not any(p.requires_grad for p in parameters)
    }


def _on_meta(job: Job) -> nn.Module:
    with torch.device("meta"):
        model = job.model.build()
    freeze(model, job.optimizer_by_steps.groups, job.data.sources)
    return model


def counted(job: Job) -> Counted:
    """Count the parameters of a job."""
    model = _on_meta(job)
    shapes = {name: p.numel() for name, p in model.named_parameters()}
    total = sum(shapes.values())
    active = getattr(model, "active_parameters", lambda: total)()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    by_role: dict[str, int] = {}
    for name, role in parameter_roles(model).items():
        by_role[role] = by_role.get(role, 0) + shapes[name]
    return Counted(total, active, trained, by_role)


def checkpoint_bytes(plan: Plan) -> float:
    """Return the bytes of a checkpoint: weights and optimizer state, each once."""
    step = plan.stages[0].step.resident
    weights = plan.parameters.total * (2 if plan.job.precision.pure_bf16 else 4)
    return weights * (1 + step[kinds.MOMENTS] / max(1.0, step[kinds.WEIGHTS]))


def as_data(plan: Plan) -> dict[str, Any]:
    """Return the plan as data for programs."""
    return {
        "job": plan.job.job.name,
        "steps": plan.job.train.steps,
        "ranks": plan.site.ranks,
        "node_ranks": plan.site.node_ranks,
        "device": plan.device_name,
        "layout": plan.sizes | {"ep": plan.job.mesh.ep},
        "micro_batches": plan.micro_batches,
        "parameters": plan.parameters._asdict(),
        "memory_bytes": plan.memory_bytes,
        "device_bytes": None if plan.device is None else plan.device.memory_gib * GIB,
        "fits": plan.fits,
        "stages": [_stage(*one) for one in zip(plan.stages, plan.peaks, plan.host, strict=True)],
        "flops": {"step": plan.flops, "step_full_attention": plan.flops_full},
        "time": None if plan.time is None else plan.time._asdict(),
        "tokens_per_s": plan.tokens_per_s,
        "mfu": plan.mfu(),
        "mfu_full_attention": plan.mfu(full=True),
        "checkpoint_bytes": checkpoint_bytes(plan),
    }


def _stage(stage: Stage, peak: tuple[Place, dict[str, float]], host: float) -> dict[str, Any]:
    place, sizes = peak
    return {
        "rank": stage.rank,
        "stage": stage.number,
        "blocks": stage.blocks,
        "blocks_run": stage.ran,
        "peak": {"place": place._asdict(), "bytes": sizes, "total": sum(sizes.values())},
        "held_bytes": stage.step.resident,
        "host_bytes": host,
        "flops": stage.step.flops,
        "moved_bytes": stage.step.moved,
        "kernels": stage.step.kernels,
        "collectives": [key._asdict() | traffic._asdict() for key, traffic in stage.step.collectives.items()],
    }
