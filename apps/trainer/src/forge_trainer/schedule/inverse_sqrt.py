"""Inverse square root of the step (Vaswani et al. 2017, arXiv:1706.03762 eq. 3)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

from forge_config import Meta

from forge_trainer.schedule.base import ScheduleConfig, schedules


@schedules.register("inverse-sqrt")
class InverseSqrtConfig(ScheduleConfig):
    """sqrt(timescale / (timescale + steps since the warm-up)); does not depend on the length of the run.

    Attributes:
        timescale_steps: steps after the warm-up until the factor is sqrt(1/2); default the length of the
            warm-up, as in the source.
    """

    timescale_steps: Annotated[int, Meta(ge=1)] | None = None

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        yield from super().contradictions()
        if self.timescale_steps is None and not (
            self.warmup_steps or self.warmup_tokens or self.warmup_fraction
        ):
            yield "there is neither a warm-up nor timescale_steps to scale the decay; give one"

    def after(self, step: int, steps: int, warmup: int) -> float:
        """See `ScheduleConfig.after`."""
        scale = self.timescale_steps or max(1, warmup)
        return math.sqrt(scale / (scale + step - warmup))
