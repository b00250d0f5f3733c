"""When a run changes what it reads: phases with weights and a learning rate of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from forge_config import Config, Meta, part_of


class PhaseConfig(Config):
    """From some step on, other weights hold. Exactly one of the three starts is given.

    Attributes:
        start_step: the first step of the phase, counted from 0.
        start_tokens: number of tokens after which it starts, rounded up to a whole step.
        start_fraction: fraction of all steps after which it starts, rounded up to a whole step.
        weights: share of each source by its `name`; other sources are not read.
        lr_scale: factor on the learning rate of the schedule.
    """

    weights: dict[str, float]
    start_step: Annotated[int, Meta(ge=1)] | None = None
    start_tokens: Annotated[int, Meta(ge=1)] | None = None
    start_fraction: Annotated[float, Meta(gt=0, lt=1)] | None = None
    lr_scale: Annotated[float, Meta(gt=0, le=1e6)] = 1.0

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        starts = (self.start_step, self.start_tokens, self.start_fraction)
        if sum(start is not None for start in starts) != 1:
            yield (
                "expected exactly one of start_step, start_tokens and start_fraction; "
                f"given {sum(start is not None for start in starts)}"
            )
        wrong = {name: w for name, w in self.weights.items() if not (0 <= w <= 1e12)}
        if wrong or not any(self.weights.values()):
            yield f"given weights {self.weights}; expected numbers from 0, one of them above 0"

    def first_step(self, steps: int, step_tokens: int) -> int:
        """Return the step at which the phase begins.

        Args:
            steps: steps of the whole run.
            step_tokens: tokens a step.
        """
        if self.start_step is not None:
            return self.start_step
        if self.start_tokens is not None:
            return -(-self.start_tokens // step_tokens)
        assert self.start_fraction is not None
        return part_of(self.start_fraction, steps)


def lr_scale(phases: Sequence[PhaseConfig], step: int, steps: int, step_tokens: int) -> float:
    """Return the factor on the learning rate of a step: that of its phase, 1 before all phases.

    Args:
        phases: the phases in the order of their starts.
        step: the step about to be taken, from 0.
        steps: steps of the whole run.
        step_tokens: tokens a step.
    """
    begun = [phase.lr_scale for phase in phases if phase.first_step(steps, step_tokens) <= step]
    return begun[-1] if begun else 1.0
