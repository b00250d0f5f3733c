"""The interface of a schedule plug: a pure function of the step, without state to save."""

import math
from collections.abc import Iterator
from typing import Annotated

from forge_config import ALL_KEYS, Config, Meta, Registry, part_of


class ScheduleConfig(Config):
    """Interface of `[schedule]`: linear warm-up, then the shape of the plug.

    Step i of the n steps after the warm-up has the factor at i / n: the first step has the peak; the last
    step is one step before `floor`. At most one of the three keys of the warm-up may be given.

    Attributes:
        warmup_steps: steps over which the factor grows linearly to 1; in the first step it is above 0.
        warmup_tokens: length of the warm-up in tokens, rounded up to steps.
        warmup_fraction: length of the warm-up as a fraction of all steps, rounded up.
    """

    recorded_keys = (ALL_KEYS,)

    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    warmup_tokens: Annotated[int, Meta(ge=0)] = 0
    warmup_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.0

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        keys = ("warmup_steps", "warmup_tokens", "warmup_fraction")
        given = [f"{key} = {getattr(self, key)}" for key in keys if getattr(self, key)]
        if len(given) > 1:
            yield f"{' and '.join(given)} say the same thing; keep one of them"

    def warmup(self, steps: int, step_tokens: int) -> int:
        """Return the number of steps of the warm-up.

        Args:
            steps: steps of the whole run.
            step_tokens: tokens of one step.
        """
        by_tokens, by_fraction = (
            -(-self.warmup_tokens // step_tokens),
            part_of(self.warmup_fraction, steps),
        )
        return max(self.warmup_steps, by_tokens, by_fraction)

    def factor(self, step: int, steps: int, step_tokens: int = 1) -> float:
        """Return the factor of the peak learning rate at a step.

        Args:
            step: the step about to be taken, from 0.
            steps: steps of the whole run.
            step_tokens: tokens of one step.

        Returns:
            A factor in [0, 1].
        """
        warmup = self.warmup(steps, step_tokens)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return self.after(step, steps, warmup)

    def after(self, step: int, steps: int, warmup: int) -> float:
        """Return the factor of a step after the warm-up, which is the first `warmup` steps."""
        return self.decay((step - warmup) / max(1, steps - warmup))

    def decay(self, progress: float) -> float:
        """Return the factor after the warm-up; `progress` runs from 0 to 1."""
        raise NotImplementedError


def cosine(progress: float) -> float:
    """Return the value of half a cosine from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * progress))


schedules = Registry("schedule", ScheduleConfig, default="cosine")
