"""Linear decay."""

from typing import Annotated

from forge_config import Meta

from forge_trainer.schedule.base import ScheduleConfig, schedules


@schedules.register("linear")
class LinearConfig(ScheduleConfig):
    """A straight line from the peak to the floor.

    Attributes:
        floor: end of the decay, as a fraction of the peak.
    """

    floor: Annotated[float, Meta(ge=0, le=1)] = 0.0

    def decay(self, progress: float) -> float:
        """See `ScheduleConfig.decay`."""
        return 1 - (1 - self.floor) * progress
