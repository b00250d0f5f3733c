"""Stages of a parameter group: when it is frozen, and its learning rate in other steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple

from forge_config import Config, Meta
from msgspec import structs

Count = Annotated[int, Meta(ge=0)]


class StageRule(Config):
    """One entry of `stages` of a group: how its parameters train from a step until the next entry.

    Attributes:
        from_step: the first step, counted from 0.
        from_tokens: the beginning in tokens of the whole run, rounded up to steps.
        frozen: whether the parameters are frozen.
        lr: factor of the learning rate.
        warmup_steps: steps over which the factor grows linearly from 0, as in the schedule of the run.
    """

    from_step: Count | None = None
    from_tokens: Count | None = None
    frozen: bool = False
    lr: Annotated[float, Meta(ge=0)] = 1.0
    warmup_steps: Count = 0

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.from_step is not None and self.from_tokens is not None:
            yield (
                f"from_step = {self.from_step} and from_tokens = {self.from_tokens} say the same; keep one"
            )
        if self.frozen and (self.lr != 1 or self.warmup_steps):
            yield (
                f"given lr = {self.lr:g} and warmup_steps = {self.warmup_steps} with frozen = true; leave "
                "them out"
            )

    def in_steps(self, step_of: Callable[[int], int]) -> StageRule:
        """Return the same stage with its beginning in steps.

        Args:
            step_of: returns the first step after a number of tokens.
        """
        if self.from_tokens is None:
            return self
        return structs.replace(self, from_step=step_of(self.from_tokens), from_tokens=None)


class Stage(NamedTuple):
    """A stage that trains.

    Attributes:
        start: first step of the stage.
        lr: factor of the learning rate.
        warmup: steps over which the factor grows.
    """

    start: int
    lr: float
    warmup: int

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate in a step of this stage."""
        return self.lr * min(1.0, (step - self.start + 1) / (self.warmup + 1))


def require_rising(rules: Sequence[StageRule]) -> None:
    """Check that each stage begins after the previous stage.

    Raises:
        ValueError: a stage does not, or some stages begin by steps and others by tokens.
    """
    by_tokens = {rule.from_tokens is not None for rule in rules if rule.from_step or rule.from_tokens}
    starts = [rule.from_step or rule.from_tokens or 0 for rule in rules]
    if len(by_tokens) > 1 or any(a >= b for a, b in itertools.pairwise(starts)):
        raise ValueError(
            f"stages begin at {', '.join(map(str, starts))}; expected rising numbers, all of them steps "
            "(from_step) or all of them tokens (from_tokens)"
        )


def frozen_steps(rules: Sequence[StageRule]) -> list[tuple[int, int | None]]:
    """Return for each frozen period its first step, and the step after its last (None: to the end)."""
    starts = [rule.from_step or 0 for rule in rules]
    ends: list[int | None] = [*starts, None]
    found: list[tuple[int, int | None]] = []
    for rule, start, end in zip(rules, starts, ends[1:], strict=True):
        if rule.frozen and found and found[-1][1] == start:
            found[-1] = found[-1][0], end
        elif rule.frozen:
            found.append((start, end))
    return found


def trained_stages(rules: Sequence[StageRule]) -> tuple[Stage, ...]:
    """Return the stages in which a parameter trains."""
    return tuple(Stage(rule.from_step or 0, rule.lr, rule.warmup_steps) for rule in rules if not rule.frozen)


def stage_lr_factor(curves: Sequence[Sequence[Sequence[float]]], step: int) -> float:
    """Return the factor of the learning rate in a step.

    Args:
        curves: the stages of each rule that matches the parameters, in rising order.
        step: number of the step, from 0.
    """
    factor = 1.0
    for curve in curves:
        begun = [Stage(int(start), lr, int(warmup)) for start, lr, warmup in curve if start <= step]
        factor *= begun[-1].factor(step) if begun else 1.0
    return factor
