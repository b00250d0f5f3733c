"""A constant learning rate after the warm-up."""

from forge_trainer.schedule.base import ScheduleConfig, schedules


@schedules.register("constant")
class ConstantConfig(ScheduleConfig):
    """The peak learning rate until the end."""

    def decay(self, progress: float) -> float:
        """See `ScheduleConfig.decay`."""
        return 1.0
