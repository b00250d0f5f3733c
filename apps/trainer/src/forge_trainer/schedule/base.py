"""What a schedule plug is: a pure function of the step, so that there is nothing to save and restore."""

import math
from collections.abc import Iterator
from typing import Annotated

from forge_config import ALL_KEYS, Config, Meta, Registry, part_of


class ScheduleConfig(Config):
    """Interface of `[schedule]`: linear warm-up, then the shape of the plug.

    Of n steps behind the warm-up, step i has the factor at i / n: the first has the peak, and the last is one
    step away from `floor`, which a further one would have.

    At most one of the three keys of the warm-up may be given.

    Attributes:
        warmup_steps: steps over which the factor grows linearly to 1; the first step is not at 0.
        warmup_tokens: the same in tokens of the whole run, rounded up to steps.
        warmup_fraction: the same as a part of all steps, rounded up.
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
        """Steps of the warm-up.

        Args:
            steps: of the whole run.
            step_tokens: tokens of one step.
        """
        by_tokens, by_fraction = (
            -(-self.warmup_tokens // step_tokens),
            part_of(self.warmup_fraction, steps),
        )
        return max(self.warmup_steps, by_tokens, by_fraction)

    def factor(self, step: int, steps: int, step_tokens: int = 1) -> float:
        """The factor on the peak learning rate at a step.

        Args:
            step: the step about to be taken, from 0.
            steps: of the whole run.
            step_tokens: tokens of one step.

        Returns:
            A factor in [0, 1].
        """
        warmup = self.warmup(steps, step_tokens)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return self.after(step, steps, warmup)

    def after(self, step: int, steps: int, warmup: int) -> float:
        """The factor of a step after the warm-up, which took the first `warmup` steps."""
        return self.decay((step - warmup) / max(1, steps - warmup))

    def decay(self, progress: float) -> float:
        """The factor after the warm-up; `progress` runs from 0 to 1."""
        raise NotImplementedError


def cosine(progress: float) -> float:
    """Half a cosine from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * progress))


schedules = Registry("schedule", ScheduleConfig, default="cosine")
