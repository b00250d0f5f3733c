"""Traces a training step of one rank: runs the code of the job on fake tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from forge_model.moe.layer import expert_layers
from forge_parallel.apply import materialize
from forge_parallel.compile_config import CompileConfig
from forge_parallel.mesh import Mesh, build_mesh
from forge_parallel.plan import Plan
from forge_resilience.finite import BuffersBefore
from msgspec import structs
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from forge_trainer.build import build_optimizer, parallel_parts
from forge_trainer.config.job import Job
from forge_trainer.plan import kinds
from forge_trainer.plan.as_on_a_gpu import as_on_a_cpu, as_on_a_gpu, use_kernels_of_a_gpu
from forge_trainer.plan.batches import batch_on_paper
from forge_trainer.plan.collectives import Collective, Collectives, Traffic, names_of_axes
from forge_trainer.plan.compiled import MatmulInputs, keep_as_compiled, loss_as_compiled
from forge_trainer.plan.depth import Depth
from forge_trainer.plan.places import Place, Places
from forge_trainer.plan.watch import Watch
from forge_trainer.plan.world import fake_tensors, group_of, nothing_changed
from forge_trainer.steps.update import Update, Updated

MICRO_BATCHES = 3
"""Micro-batches to run without a pipeline: the first, the last, and one that represents all others."""

ROUNDING = 512
"""The granularity of CUDA's allocator in bytes."""


@dataclasses.dataclass(frozen=True)
class Site:
    """The machine that a job is planned for.

    Attributes:
        ranks: number of ranks of the job.
        node_ranks: number of ranks of a node.
        on_gpu: whether a rank computes on a GPU, otherwise on a CPU.
    """

    ranks: int = 1
    node_ranks: int = 8
    on_gpu: bool = True


class StageFormats(NamedTuple):
    """Names and dtypes that pipeline stages exchange at their first step.

    Attributes:
        names: names and dtypes of the sums of a step, which the last stage knows.
        statistics: names and dtypes of the statistics of each expert layer.
    """

    names: dict[str, torch.dtype]
    statistics: dict[str, torch.dtype]


@dataclasses.dataclass
class Traced:
    """Cost of one step on one rank.

    Attributes:
        peaks: bytes of each kind at the peak of each place.
        resident: bytes of weights, buffers and moments between steps.
        collectives: count and bytes of each kind of collective.
        flops: FLOPs of this rank by kind; recomputation counts again.
        moved: bytes that operations without FLOPs read and write, by phase.
        kernels: number of operations that compute or copy.
        formats: names and dtypes that other pipeline stages need.
        kept: see `kinds.kept`.
    """

    peaks: dict[Place, dict[str, float]]
    resident: dict[str, float]
    collectives: dict[Collective, Traffic]
    flops: dict[str, float]
    moved: dict[str, float]
    kernels: float
    formats: StageFormats
    kept: dict[str, dict[str, float]]


def traced(
    job: Job,
    site: Site,
    rank: int,
    micro_batches: int,
    depth: Depth | None = None,
    skew: float = 1.0,
    formats: StageFormats | None = None,
    whole: bool = False,
) -> Traced:
    """Trace a training step of a rank after its first step, with optimizer state.

    Args:
        job: the configuration.
        site: the machine.
        rank: rank among `site.ranks`.
        micro_batches: number of micro-batches of the step.
        depth: leaves out some of the repeated blocks; None keeps all.
        skew: rows that the rank's experts serve, in multiples of even routing.
        formats: formats of the last pipeline stage; None for the last stage itself.
        whole: whether to run every micro-batch.

    Raises:
        ParallelError: the ranks do not fit the mesh of the job.
    """
    paper = on_paper(job, site.on_gpu)
    places = Places()
    watch = Watch(places, ROUNDING if site.on_gpu else 1)
    with ExitStack() as stack:
        stack.enter_context(nothing_changed())
        stack.enter_context(as_on_a_gpu(watch.add_flops) if site.on_gpu else as_on_a_cpu())
        needed = paper.parallel.needs_group("cpu")
        mesh = build_mesh(paper.mesh, stack.enter_context(group_of(site.ranks, rank, needed)))
        noted = Collectives(names_of_axes(mesh), site.node_ranks)
        compiled: list[str] = []
        parts = parallel_parts(paper, mesh, partial(_prepared, job, site.on_gpu, depth, compiled))
        called: list[str] = []
        for number, part in enumerate(parts):
            prefix = f"stage part {number}: " if len(parts) > 1 else ""
            short = places.follow(part, _blocks(part), prefix)
            called += [prefix + short[name] for name in compiled if name in short]
        places.compiled = MatmulInputs(called) if called else None
        watch.fakes = stack.enter_context(fake_tensors(skew))
        stack.enter_context(watch)
        run = micro_batches if whole or mesh.pipeline.size > 1 else min(micro_batches, MICRO_BATCHES)
        return _run(paper, job, mesh, parts, micro_batches, run, watch, noted, formats)


def _run(
    paper: Job,
    job: Job,
    mesh: Mesh,
    parts: list[nn.Module],
    micro_batches: int,
    run: int,
    watch: Watch,
    noted: Collectives,
    formats: StageFormats | None,
) -> Traced:
    for part in parts:
        materialize(part, mesh.device)
    watch.known(kinds.WEIGHTS, (p for part in parts for p in part.parameters()))
    watch.known(kinds.BUFFERS, (b for part in parts for b in part.buffers()))
    optimizer, places = build_optimizer(paper, parts, mesh), watch.places
    if mesh.pipeline.size == 1:
        _number_micro_batches(parts[0], places, run)
    loss = places.around(loss_as_compiled(job) if job.compile.enabled else paper.loss.build())
    update = Followed(
        parts, optimizer, lambda step: 1.0, paper.train.clip_norm, mesh, paper.optimizer.ema_decay
    )
    update.watch = watch
    step = paper.step.build(parts, loss, mesh, seed=paper.job.seed, update=update)
    if formats is not None:
        step._names = formats.names  # type: ignore[attr-defined]
    batch = batch_on_paper(paper, run)
    watch.known(kinds.INPUTS, (x for micro in batch for x in micro.inputs.values()))
    if mesh.pipeline.size > 1 and any(expert_layers(part) for part in parts):
        step.train(batch, 0)  # stages tell each other what their experts count
    now = _exchange_names(step, paper, parts, formats)
    places.begin("forward", "first")
    watch.start()
    watch.on_operation = lambda name, arguments, out: noted.note(name, arguments, out, places.now)
    step.train(batch, 1)
    watch.on_operation = None
    watch.known(kinds.MOMENTS, _state(optimizer))
    now = now if now.names else _exchange_names(step, paper, parts, formats)
    kinds.resolve(watch)
    peaks, resident = kinds.peaks(watch), kinds.resident(watch)
    for one in (resident, *peaks.values()):
        one[kinds.INPUTS] *= micro_batches / run
    return Traced(
        peaks,
        resident,
        _traffic(noted, micro_batches - run),
        _total(watch.flops, micro_batches - run),
        _total(watch.moved, micro_batches - run),
        sum(number * (1 + _more(micro, micro_batches - run)) for micro, number in watch.kernels.items()),
        now,
        kinds.kept(watch),
    )


def _exchange_names(
    step: Any, job: Job, parts: list[nn.Module], formats: StageFormats | None
) -> StageFormats:
    """After its first step, set in a step the names of all pipeline stages, and return its formats."""
    own = {f"{name}/": layer for part in parts for name, layer in expert_layers(part).items()}
    known: dict[str, torch.dtype] = getattr(step, "_statistics", None) or {}
    kinds_of = {
        key[len(name) :]: dtype for key, dtype in known.items() for name in own if key.startswith(name)
    }
    kinds_of = kinds_of or (formats.statistics if formats is not None else {})
    if job.mesh.pp > 1 and kinds_of:
        with torch.device("meta"), unset_fake_temporarily():
            everywhere = expert_layers(job.model.build())
        step._statistics = {
            f"{layer}/{kind}": dtype for layer in everywhere for kind, dtype in kinds_of.items()
        }
    return StageFormats(getattr(step, "_names", None) or {}, kinds_of)


def _more(micro: str, left_out: int) -> int:
    """Return how often a micro-batch is repeated: the middle one represents all that are left out."""
    return left_out if micro == "middle" else 0


def _total(counts: Mapping[tuple[str, str], float], left_out: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for (micro, key), number in counts.items():
        found[key] = found.get(key, 0.0) + number * (1 + _more(micro, left_out))
    return found


def _traffic(noted: Collectives, left_out: int) -> dict[Collective, Traffic]:
    found: dict[Collective, Traffic] = {}
    for (micro, key), traffic in noted.found.items():
        times, before = 1 + _more(micro, left_out), found.get(key, Traffic(0, 0))
        found[key] = Traffic(before.count + times * traffic.count, before.bytes + times * traffic.bytes)
    return found


class Followed(Update):
    """An `Update` that informs the watch of its beginning and of the gradients."""

    watch: Watch

    def __call__(self, step: int, loss: Tensor, saved_buffers: Sequence[BuffersBefore] = ()) -> Updated:
        """See `Update.__call__`."""
        self.watch.places.begin("update")
        self.watch.known(kinds.GRADIENTS, (p.grad for part in self.parts for p in part.parameters()))
        return super().__call__(step, loss, saved_buffers)


def _number_micro_batches(model: nn.Module, places: Places, count: int) -> None:
    """Record which micro-batch begins; its backward pass ends before the next one begins."""
    number = [0]

    def begin(*_: Any) -> None:
        index = number[0] % count
        places.begin("forward", "last" if index == count - 1 else "middle" if index else "first")
        number[0] += 1

    model.register_forward_pre_hook(begin)


def _prepared(
    job: Job, on_gpu: bool, depth: Depth | None, compiled: list[str], number: int, model: nn.Module
) -> None:
    """Prepare a part before it is parallelized."""
    if depth is not None:
        depth.cut(model, number)
    if on_gpu:
        use_kernels_of_a_gpu(model)
        if job.compile.enabled:
            compiled += keep_as_compiled(model, job.activation_checkpointing)


def _blocks(model: nn.Module) -> list[str]:
    from forge_parallel.match import find

    return [name for pattern in Plan.of(model).flat().block_patterns for name in find(model, pattern)]


def _state(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return all tensors of the optimizer state."""
    return [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]


def on_paper(job: Job, on_gpu: bool) -> Job:
    """Return the job for a trace: with the number formats of its device, and blocks uncompiled."""
    changes: dict[str, Any] = {"compile": CompileConfig()}
    if on_gpu and not job.precision.pure_bf16:
        compute = job.precision.compute_dtype("cuda")
        changes["precision"] = structs.replace(job.precision, compute=compute)
    recompute = job.activation_checkpointing
    if recompute.mode == "budget":  # the compiler chooses what it keeps
        changes["activation_checkpointing"] = structs.replace(recompute, mode="selective")
    if job.fp8.recipe != "none":
        # the kernels that round for experts are Triton's, which fake tensors do not know
        changes["fp8"] = structs.replace(job.fp8, experts=False)
    return structs.replace(job, **changes)
