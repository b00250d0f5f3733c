"""Cosine decay (Loshchilov & Hutter 2017, arXiv:1608.03983 eq. 5, one cycle)."""

from typing import Annotated

from forge_config import Meta

from forge_trainer.schedule.base import ScheduleConfig, cosine, schedules


@schedules.register("cosine")
class CosineConfig(ScheduleConfig):
    """Half a cosine from the peak to the floor.

    Attributes:
        floor: end of the decay, as a fraction of the peak.
    """

    floor: Annotated[float, Meta(ge=0, le=1)] = 0.1

    def decay(self, progress: float) -> float:
        """See `ScheduleConfig.decay`."""
        return self.floor + (1 - self.floor) * cosine(progress)
