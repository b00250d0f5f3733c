"""From steps of few blocks and few micro-batches to the step of the job: everything grows by equal portions.

Memory at a place, collectives, FLOPs and bytes are sums over blocks and micro-batches, and places count
blocks from both ends. So a step of n more blocks takes n times what one more takes, exactly; what lies
between the places at both ends is between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from forge_trainer.plan import kinds
from forge_trainer.plan.collectives import Collective, Traffic
from forge_trainer.plan.depth import Repeat
from forge_trainer.plan.trace import Traced

Key = TypeVar("Key")


ONCE = ("fsdp", "dp_replicate", "efsdp")
"""Axes over which a pipeline communicates once a step, not once a micro-batch."""


class Point(NamedTuple):
    """A step that is traced.

    Attributes:
        more: the repeat of which one turn more is kept than of the base; None for the base.
        share: how often it counts.
    """

    more: Repeat | None
    share: float


def points(turns: Mapping[Repeat, int]) -> list[Point]:
    """The depths to trace, each with its weight in the sum.

    Args:
        turns: of each repeat, how many more the job has than the base.
    """
    return [Point(None, 1.0 - sum(turns.values())), *(Point(one, more) for one, more in turns.items())]


def with_micro_batches(step: Traced, traced: int, number: int, all_in_flight: bool) -> Traced:
    """The step of a stage of a pipeline that works on `number` micro-batches, of which `traced` were run.

    Gradients are summed over ranks once; all else is done so many times more. What a stage sends back it
    keeps until the step ends.

    Args:
        step: with few micro-batches.
        traced: how many.
        number: of the job.
        all_in_flight: whether all forward passes come before the first backward pass.
    """
    if traced == number:
        return step
    times = number / traced

    def often(collective: Collective) -> float:
        by_step = (
            collective.axis in ONCE
            or collective.phase == "update"
            or (collective.kind, collective.axis) == ("all-reduce", "pp")
        )
        return 1.0 if by_step else times

    phases = ("forward", "backward") if all_in_flight else ("backward",)
    growth = _sum([(times - 1, step.kept[phase]) for phase in phases])
    peaks = {
        place: _sum([(1.0, one), (float(place.phase != "update"), growth)])
        | {kinds.INPUTS: times * one[kinds.INPUTS]}
        for place, one in step.peaks.items()
    }
    return replace(
        step,
        peaks=peaks,
        held=step.held | {kinds.INPUTS: times * step.held[kinds.INPUTS]},
        collectives={s: Traffic(often(s) * t.count, often(s) * t.bytes) for s, t in step.collectives.items()},
        flops={kind: times * number for kind, number in step.flops.items()},
        moved={p: size * (1.0 if p in ("gather", "update") else times) for p, size in step.moved.items()},
        kernels=times * step.kernels,
    )


def combined(traces: Sequence[tuple[float, Traced]]) -> Traced:
    """The sum of steps, each so many times."""
    places = set.intersection(*({*trace.peaks} for _, trace in traces))
    peaks = {
        place: _sum([(share, trace.peaks[place]) for share, trace in traces])
        for place in traces[0][1].peaks
        if place in places
    }
    keys = {key for _, trace in traces for key in trace.collectives}
    return Traced(
        peaks,
        _sum([(share, trace.held) for share, trace in traces]),
        {
            key: Traffic(
                sum(
                    share * trace.collectives[key].count
                    for share, trace in traces
                    if key in trace.collectives
                ),
                sum(
                    share * trace.collectives[key].bytes
                    for share, trace in traces
                    if key in trace.collectives
                ),
            )
            for key in sorted(keys)
        },
        _sum([(share, trace.flops) for share, trace in traces]),
        _sum([(share, trace.moved) for share, trace in traces]),
        sum(share * trace.kernels for share, trace in traces),
        traces[0][1].formats,
        {phase: _sum([(share, trace.kept[phase]) for share, trace in traces]) for phase in traces[0][1].kept},
    )


def _sum(parts: Sequence[tuple[float, Mapping[Key, float]]]) -> dict[Key, float]:
    keys = dict.fromkeys(key for _, part in parts for key in part)
    return {key: sum(share * part.get(key, 0.0) for share, part in parts) for key in keys}
