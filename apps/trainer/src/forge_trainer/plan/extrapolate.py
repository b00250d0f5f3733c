"""From steps of few blocks and few micro-batches to the step of the job: everything grows by equal portions.

Memory at a place, collectives, FLOPs and bytes are sums over blocks and micro-batches, and places count blocks
from both ends. So a step of n more blocks takes n times what one more takes, exactly; what lies between the
places at both ends is between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from forge_trainer.plan.collectives import Traffic
from forge_trainer.plan.depth import Repeat
from forge_trainer.plan.trace import Traced

Key = TypeVar("Key")


class Point(NamedTuple):
    """A step that is traced.

    Attributes:
        more: the repeat of which one turn more is kept than of the base; None for the base.
        micro_batches: of the step.
        share: how often it counts.
    """

    more: Repeat | None
    micro_batches: int
    share: float


def points(turns: Mapping[Repeat, int], micro_batches: int, traced: Sequence[int]) -> list[Point]:
    """What to trace.

    Args:
        turns: of each repeat, how many more the job has than the base.
        micro_batches: of the job.
        traced: one or two numbers of micro-batches to trace with.
    """
    few, many = traced[0], traced[-1]
    beyond = (micro_batches - few) / (many - few) if many > few else 0.0
    base = 1.0 - sum(turns.values())
    found = []
    for number, share in ((few, 1.0 - beyond), (many, beyond)):
        if share:
            found.append(Point(None, number, base * share))
            found += [Point(repeat, number, more * share) for repeat, more in turns.items()]
    return found


def combined(traces: Sequence[tuple[float, Traced]]) -> Traced:
    """The sum of steps, each so many times."""
    places = set.intersection(*({*trace.peaks} for _, trace in traces))
    peaks = {
        place: _sum([(share, trace.peaks[place]) for share, trace in traces])
        for place in traces[0][1].peaks
        if place in places
    }
    said = {key for _, trace in traces for key in trace.said}
    return Traced(
        peaks,
        _sum([(share, trace.held) for share, trace in traces]),
        {
            key: Traffic(
                sum(share * trace.said[key].count for share, trace in traces if key in trace.said),
                sum(share * trace.said[key].bytes for share, trace in traces if key in trace.said),
            )
            for key in sorted(said)
        },
        _sum([(share, trace.flops) for share, trace in traces]),
        _sum([(share, trace.moved) for share, trace in traces]),
        sum(share * trace.kernels for share, trace in traces),
        traces[0][1].told,
    )


def _sum(parts: Sequence[tuple[float, Mapping[Key, float]]]) -> dict[Key, float]:
    keys = dict.fromkeys(key for _, part in parts for key in part)
    return {key: sum(share * part.get(key, 0.0) for share, part in parts) for key in keys}
