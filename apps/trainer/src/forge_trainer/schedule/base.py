"""What a schedule plug is: a pure function of the step, so that there is nothing to save and restore."""

from typing import Annotated

from forge_config import ALL_KEYS, Config, Meta, Registry


class ScheduleConfig(Config):
    """Interface of `[schedule]`: linear warm-up, then the shape of the plug.

    Attributes:
        warmup_steps: steps over which the factor grows linearly to 1; the first step is not at 0.
    """

    recorded_keys = (ALL_KEYS,)

    warmup_steps: Annotated[int, Meta(ge=0)] = 0

    def factor(self, step: int, steps: int) -> float:
        """What the peak learning rate is multiplied by.

        Args:
            step: the step about to be taken, from 0.
            steps: steps of the whole run.

        Returns:
            A factor in [0, 1].
        """
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        return self.decay((step - self.warmup_steps) / max(1, steps - self.warmup_steps))

    def decay(self, progress: float) -> float:
        """The factor after the warm-up; `progress` runs from 0 to 1."""
        raise NotImplementedError


schedules = Registry("schedule", ScheduleConfig, default="cosine")
