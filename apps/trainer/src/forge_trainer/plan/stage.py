"""Finds the cost of a step of one pipeline stage, or of the whole model: traced in full, or extrapolated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from forge_parallel.plan import Plan
from forge_parallel.stages import keep_stage, stages_of
from msgspec import structs

from forge_trainer.config.job import Job
from forge_trainer.optim.groups import freeze
from forge_trainer.plan.depth import Depth, Repeat, repeats_of
from forge_trainer.plan.extrapolate import combined, points, with_micro_batches
from forge_trainer.plan.trace import Site, StageFormats, Traced, traced

KEPT_BLOCKS, KEPT_IN_PIPELINE = 4, 2
"""The number of repeated blocks to keep: FSDP2 treats the first and the last ones differently."""


class Stage(NamedTuple):
    """Cost of one pipeline stage, traced for one of its ranks.

    Attributes:
        rank: the traced rank.
        number: number of the rank along the pipeline.
        step: cost of its step.
        blocks: number of its blocks.
        ran: largest number of blocks that were run in a trace.
    """

    rank: int
    number: int
    step: Traced
    blocks: int
    ran: int


def micro_batches_of(job: Job, ranks: int) -> int:
    """Return the micro-batches of a rank in a step, after the warm-up of the batch."""
    sizes = job.mesh.sizes(ranks)
    return job.train.global_batch // (sizes["dp_replicate"] * sizes["dp_shard"] * job.train.micro_batch)


def stages_on_paper(job: Job, site: Site, numbers: Iterable[int], *, whole: bool = False) -> list[Stage]:
    """Find the costs of pipeline ranks, sorted by their number along the pipeline.

    Args:
        job: the configuration.
        site: the machine.
        numbers: numbers of the ranks; must include the rank of the last stage, which others depend on.
        whole: see `stage_on_paper`.

    Raises:
        ParallelError: the ranks do not fit the mesh of the job.
    """
    first = 0 if job.pipeline.is_v else job.mesh.pp - 1
    last = stage_on_paper(job, site, first, whole=whole)
    others = [
        stage_on_paper(job, site, number, whole=whole, formats=last.step.formats)
        for number in numbers
        if number != first
    ]
    return sorted([last, *others], key=lambda stage: stage.number)


def stage_on_paper(
    job: Job,
    site: Site,
    number: int = 0,
    *,
    whole: bool = False,
    skew: float = 1.0,
    formats: StageFormats | None = None,
) -> Stage:
    """Find the cost of a step on a rank of a pipeline stage.

    Args:
        job: the configuration.
        site: the machine.
        number: number of the rank along the pipeline.
        whole: whether to run all blocks and micro-batches, also repeated ones.
        skew: see `traced`.
        formats: see `traced`.

    Raises:
        ParallelError: the ranks do not fit the mesh of the job.
    """
    if job.activation_checkpointing.mode == "offload":
        return _offloaded(job, site, number, whole=whole, skew=skew, formats=formats)
    sizes, micro_batches = job.mesh.sizes(site.ranks), micro_batches_of(job, site.ranks)
    rank = number * (site.ranks // sizes["pp"])
    repeats, blocks = _repeats(job, number, sizes["pp"])
    least = (KEPT_IN_PIPELINE if sizes["pp"] > 1 else KEPT_BLOCKS) + job.fsdp.prefetch
    few = {one: _few(one, least) for one in repeats}
    dropped = {one: one.turns - turns for one, turns in few.items() if one.turns - turns > 1}
    run = micro_batches if sizes["pp"] == 1 else min(micro_batches, _enough(job, sizes["pp"]))
    if whole:
        dropped, run = {}, micro_batches
    found = []
    for point in points(dropped):
        left_out = {one: turns - (one == point.more) for one, turns in dropped.items()}
        depth = Depth(left_out) if left_out else None
        found.append((point.share, traced(job, site, rank, run, depth, skew, formats, whole)))
    step = with_micro_batches(combined(found), run, micro_batches, job.pipeline.schedule == "gpipe")
    gone = sum(turns * one.period for one, turns in dropped.items())
    periods = max((one.period for one in dropped), default=0)
    return Stage(rank, number, step, blocks, blocks - gone + periods)


def _offloaded(job: Job, site: Site, number: int, **options: Any) -> Stage:
    """Find the cost with activations on the host: memory as with mode `full`, computation as with `none`."""

    def with_mode(mode: str) -> Stage:
        config = structs.replace(job.activation_checkpointing, mode=mode)
        return stage_on_paper(structs.replace(job, activation_checkpointing=config), site, number, **options)

    full, computed = with_mode("full"), with_mode("none")
    step = replace(computed.step, peaks=full.step.peaks, resident=full.step.resident, kept=full.step.kept)
    return computed._replace(step=step)


def _few(repeat: Repeat, least: int) -> int:
    """Return the number of periods of a repeat to keep."""
    others = len(repeat.names) - repeat.turns * repeat.period
    return max(1, -(-(least - others) // repeat.period))


def _enough(job: Job, stages: int) -> int:
    """Return a number of micro-batches above which no more are in flight at once while gradients exist.

    With `gpipe` all are in flight, and each further one adds the same cost.
    """
    return {"gpipe": stages, "1f1b": stages + 1}.get(job.pipeline.schedule, 2 * stages)


def _repeats(job: Job, number: int, stages: int) -> tuple[list[Repeat], int]:
    """Return the repeats in the parts of a rank, and the number of blocks of the parts."""
    config = job.activation_checkpointing
    multiple = config.every if config.mode == "every" else 1
    found, blocks = [], 0
    for part, stage in enumerate(stages_of(number, stages, job.pipeline)):
        with torch.device("meta"):
            model = job.model.build()
        freeze(model, job.optimizer_by_steps.groups, job.data.sources)
        keep_stage(model, Plan.of(model), stage, stages, job.pipeline)
        found += repeats_of(model, part, multiple)
        blocks += _number_of_blocks(model)
    return found, blocks


def _number_of_blocks(model: torch.nn.Module) -> int:
    from forge_parallel.match import find

    return sum(len(find(model, pattern)) for pattern in Plan.of(model).flat().block_patterns)
