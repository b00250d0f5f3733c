"""Which blocks of a model repeat, and models with fewer of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from forge_parallel.match import find
from forge_parallel.plan import Plan
from torch import nn

MOST_SINGLE, MOST_PERIOD = 4, 8
"""Blocks at each end that may be unlike the others; and how many may take turns."""


class Repeat(NamedTuple):
    """Blocks of one family that repeat.

    Attributes:
        part: number of the part of the model.
        names: of all blocks of the family, in order.
        before: blocks before those that repeat.
        period: how many take turns.
        turns: how often they do.
    """

    part: int
    names: tuple[str, ...]
    before: int
    period: int
    turns: int

    def without(self, turns: int) -> list[str]:
        """The names of the blocks that are left out with so many turns less, from the middle."""
        first = self.before + (self.turns - turns + 1) // 2 * self.period
        return list(self.names[first : first + turns * self.period])


@dataclass(frozen=True)
class Depth:
    """Leaves out blocks.

    Attributes:
        left_out: how many turns of each repeat.
    """

    left_out: Mapping[Repeat, int]

    def cut(self, model: nn.Module, part: int) -> None:
        """Delete them, in place."""
        for repeat, turns in self.left_out.items():
            for name in repeat.without(turns) if repeat.part == part else ():
                path, _, key = name.rpartition(".")
                parent: Any = model.get_submodule(path)
                del parent[key]


def repeats_of(model: nn.Module, part: int, multiple: int = 1) -> list[Repeat]:
    """Find the repeated blocks in a part of a model.

    Args:
        model: before it is made parallel.
        part: its number.
        multiple: of a period; as many blocks as `activation_checkpointing.every` counts.
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
    """Blocks before, length and number of turns, so that as few blocks as possible lie in none."""
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
    """A key that is equal for blocks of equal modules."""
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
