"""Which learning-rate schedules a run may use: the registry of the open section `[schedule]`."""

from forge_trainer.schedule.base import ScheduleConfig as ScheduleConfig
from forge_trainer.schedule.base import schedules as schedules

from forge_trainer.schedule.constant import ConstantConfig as ConstantConfig  # isort: skip
from forge_trainer.schedule.cosine import CosineConfig as CosineConfig  # isort: skip
from forge_trainer.schedule.linear import LinearConfig as LinearConfig  # isort: skip

__all__ = ["ConstantConfig", "CosineConfig", "LinearConfig", "ScheduleConfig", "schedules"]
