"""Learning-rate schedules of a run: the registry of the open section `[schedule]`."""

from forge_trainer.schedule.base import ScheduleConfig as ScheduleConfig
from forge_trainer.schedule.base import schedules as schedules

from forge_trainer.schedule.constant import ConstantConfig as ConstantConfig  # isort: skip
from forge_trainer.schedule.cosine import CosineConfig as CosineConfig  # isort: skip
from forge_trainer.schedule.inverse_sqrt import InverseSqrtConfig as InverseSqrtConfig  # isort: skip
from forge_trainer.schedule.linear import LinearConfig as LinearConfig  # isort: skip
from forge_trainer.schedule.none import NoneConfig as NoneConfig  # isort: skip
from forge_trainer.schedule.rex import RexConfig as RexConfig  # isort: skip
from forge_trainer.schedule.wsd import WSDConfig as WSDConfig  # isort: skip

__all__ = [
    "ConstantConfig",
    "CosineConfig",
    "InverseSqrtConfig",
    "LinearConfig",
    "NoneConfig",
    "RexConfig",
    "ScheduleConfig",
    "WSDConfig",
    "schedules",
]
