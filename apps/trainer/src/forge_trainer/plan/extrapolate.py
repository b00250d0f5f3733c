"""Extrapolates steps of few blocks and few micro-batches to the step of the job: costs grow linearly.

Memory at a place, collectives, FLOPs and bytes are sums over blocks and micro-batches, and places count
blocks from both ends. So n more blocks add exactly n times the cost of one more block; the memory at places
in the middle is between the memory at the places at both ends.
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
"""Axes over which a pipeline communicates once in a step, not once for each micro-batch."""


class Point(NamedTuple):
    """A step to trace.

    Attributes:
        more: the repeat that keeps one period more than in the base; None for the base itself.
        share: weight of the step in the sum.
    """

    more: Repeat | None
    share: float


def points(turns: Mapping[Repeat, int]) -> list[Point]:
    """Return the depths to trace, each with its weight in the sum.

    Args:
        turns: for each repeat, the number of periods that the job has more than the base.
    """
    return [Point(None, 1.0 - sum(turns.values())), *(Point(one, more) for one, more in turns.items())]


def with_micro_batches(step: Traced, traced: int, number: int, all_in_flight: bool) -> Traced:
    """Extrapolate the step of a pipeline stage from `traced` to `number` micro-batches.

    Gradients are summed over ranks once; all other costs grow with the number of micro-batches. A stage keeps
    the gradients that it sends back until the step ends.

    Args:
        step: the step with few micro-batches.
        traced: number of micro-batches in `step`.
        number: number of micro-batches of the job.
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
        resident=step.resident | {kinds.INPUTS: times * step.resident[kinds.INPUTS]},
        collectives={s: Traffic(often(s) * t.count, often(s) * t.bytes) for s, t in step.collectives.items()},
        flops={kind: times * number for kind, number in step.flops.items()},
        moved={p: size * (1.0 if p in ("gather", "update") else times) for p, size in step.moved.items()},
        kernels=times * step.kernels,
    )


def combined(traces: Sequence[tuple[float, Traced]]) -> Traced:
    """Return the weighted sum of steps."""
    places = set.intersection(*({*trace.peaks} for _, trace in traces))
    peaks = {
        place: _sum([(share, trace.peaks[place]) for share, trace in traces])
        for place in traces[0][1].peaks
        if place in places
    }
    keys = {key for _, trace in traces for key in trace.collectives}
    return Traced(
        peaks,
        _sum([(share, trace.resident) for share, trace in traces]),
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
