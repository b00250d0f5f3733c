"""No schedule at all."""

from collections.abc import Iterator

from forge_trainer.schedule.base import ScheduleConfig, schedules


@schedules.register("none")
class NoneConfig(ScheduleConfig):
    """The peak learning rate in every step; takes no warm-up (see `constant`)."""

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        yield from super().contradictions()
        if self.warmup_steps or self.warmup_tokens or self.warmup_fraction:
            yield 'type = "none" has no warm-up; use type = "constant"'

    def decay(self, progress: float) -> float:
        """See `ScheduleConfig.decay`."""
        return 1.0
