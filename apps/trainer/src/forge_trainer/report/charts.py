"""Groups the curves of a run into charts. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Chart:
    """A chart of a report.

    Attributes:
        title: title with the unit.
        pattern: pattern of the names of its series.
        log: whether the scale of the values is logarithmic at first.
        more: whether the chart is shown on demand only.
    """

    title: str
    pattern: str
    log: bool = False
    more: bool = False


CHARTS = (
    Chart("Loss (nats a token)", r"loss(/.+)?"),
    Chart("Validation loss (nats a token)", r"eval/(.+/)?loss(/.+)?"),
    Chart("Learning rate", r"lr"),
    Chart("Gradient norm", r"grad_norm", log=True),
    Chart("Tokens a second", r"tokens_per_s"),
    Chart("Model FLOPs utilization", r"mfu\w*|hfu"),
    Chart("Memory (GiB)", r"memory_gib|memory/\w+_gib"),
    Chart("Memory: part of the device taken, part of that unused", r"memory/(utilization|fragmentation)"),
    Chart("Goodput", r"goodput"),
    Chart("Tasks", r"eval/tasks/.+"),
    Chart("Router: load of the fullest expert over the mean", r".+/load_max_over_mean"),
    Chart("Router: entropy of the load", r".+/load_entropy", more=True),
    Chart("Router: experts without a token", r".+/dead_experts", more=True),
    Chart("Router: part of the pairs dropped", r".+/drop_rate", more=True),
    Chart("Router: balance loss", r".+/balance_loss", more=True),
    Chart("Norms of weights by layer", r"norms/weight/.+"),
    Chart("Norms of gradients by layer", r"norms/grad/.+", log=True),
    Chart("Update over weight by layer", r"norms/update_ratio/.+", log=True),
    Chart("Where the host spends a step (s)", r"time/.+", more=True),
    Chart("Where the device spends a step (s)", r"device/.+", more=True),
    Chart("Speed of the slowest rank (1 is even)", r"straggler/.+", more=True),
    Chart("Steps skipped since the line before", r"skipped", more=True),
)

HIDDEN = {"tokens", "time", "memory/retries"}
"""Series that are axes, or no curve."""


def charts_of(names: Iterable[str]) -> list[tuple[Chart, list[str]]]:
    """Return charts with the names of their series; other series get charts by the start of their name."""
    rest = [name for name in dict.fromkeys(names) if name not in HIDDEN]
    found: list[tuple[Chart, list[str]]] = []
    for chart in CHARTS:
        mine = [name for name in rest if re.fullmatch(chart.pattern, name)]
        rest = [name for name in rest if name not in mine]
        if mine:
            found.append((chart, mine))
    others: dict[str, list[str]] = {}
    for name in rest:
        others.setdefault("/".join(name.split("/")[:2]) if "/" in name else name, []).append(name)
    return [*found, *((Chart(title, "", more=True), mine) for title, mine in others.items())]
