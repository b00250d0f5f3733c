"""Finds the blocks of a model that repeat, and removes some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from forge_parallel.match import find
from forge_parallel.plan import Plan
from torch import nn

MOST_SINGLE, MOST_PERIOD = 4, 8
"""The most blocks at each end that may differ from the others; and the longest period of blocks."""


class Repeat(NamedTuple):
    """Blocks of one family that repeat.

    Attributes:
        part: number of the part of the model.
        names: names of all blocks of the family, in order.
        before: number of blocks before the repeated ones.
        period: number of blocks in a period.
        turns: number of periods.
    """

    part: int
    names: tuple[str, ...]
    before: int
    period: int
    turns: int

    def without(self, turns: int) -> list[str]:
        """Return the names of the blocks to leave out, so many periods from the middle."""
        first = self.before + (self.turns - turns + 1) // 2 * self.period
        return list(self.names[first : first + turns * self.period])


@dataclass(frozen=True)
class Depth:
    """A reduction of the depth of a model.

    Attributes:
        left_out: number of periods to leave out of each repeat.
    """

    left_out: Mapping[Repeat, int]

    def cut(self, model: nn.Module, part: int) -> None:
        """Delete the blocks from a part, in place."""
        for repeat, turns in self.left_out.items():
            for name in repeat.without(turns) if repeat.part == part else ():
                path, _, key = name.rpartition(".")
                parent: Any = model.get_submodule(path)
                del parent[key]


def repeats_of(model: nn.Module, part: int, multiple: int = 1) -> list[Repeat]:
    """Find the repeated blocks in a part of a model.

    Args:
        model: the part, before it is parallelized.
        part: number of the part.
        multiple: divisor of the period; the value of `activation_checkpointing.every`.
    """
    families: dict[str, list[str]] = {}
    for pattern in Plan.of(model).flat().block_patterns:
        for name in find(model, pattern):
            families.setdefault(name.rpartition(".")[0], []).append(name)
    found = []
    for family, names in families.items():
        if isinstance(model.get_submodule(family), nn.ModuleDict):
            kinds = [_kind(model.get_submodule(name)) for name in names]
            before, period, turns = _period(kinds, multiple)
            if turns > 1:
                found.append(Repeat(part, tuple(names), before, period, turns))
    return found


def _period(kinds: Sequence[Any], multiple: int) -> tuple[int, int, int]:
    """Return blocks before, period and number of periods, so that as few blocks as possible must be run."""
    best = (0, 1, 0)
    least = len(kinds) + 1
    for before in range(MOST_SINGLE + 1):
        for after in range(MOST_SINGLE + 1):
            inner = kinds[before : len(kinds) - after]
            for period in range(multiple, MOST_PERIOD * multiple + 1, multiple):
                alike = all(a == b for a, b in zip(inner, inner[period:], strict=False))
                kept = before + after + period
                if len(inner) >= 2 * period and alike and kept < least:
                    least, best = kept, (before, period, len(inner) // period)
    return best


def _kind(block: nn.Module) -> Any:
    """Return a key that is equal for blocks of equal modules."""
    plain = (bool, int, float, str, type(None))
    return [
        (
            name,
            type(module).__name__,
            [(key, tuple(p.shape), p.requires_grad) for key, p in module.named_parameters(recurse=False)],
            sorted((key, value) for key, value in vars(module).items() if isinstance(value, plain)),
        )
        for name, module in block.named_modules()
    ]
