"""The reflected exponential (Chen et al. 2021, arXiv:2107.04197 section 3)."""

from typing import Annotated

from forge_config import Meta

from forge_trainer.schedule.base import ScheduleConfig, schedules


@schedules.register("rex")
class RexConfig(ScheduleConfig):
    """A decay that is slow at first and steep at the end.

    Attributes:
        floor: end of the decay, as a fraction of the peak.
    """

    floor: Annotated[float, Meta(ge=0, le=1)] = 0.0

    def decay(self, progress: float) -> float:
        """See `ScheduleConfig.decay`."""
        return self.floor + (1 - self.floor) * (1 - progress) / (1 - progress / 2)
