"""Optimizers of a run: the registry of the open section `[optimizer]`."""

from forge_trainer.optim.base import OptimizerConfig as OptimizerConfig
from forge_trainer.optim.base import optimizers as optimizers
from forge_trainer.optim.groups import GroupRule as GroupRule
from forge_trainer.optim.parameters import NamedParameter as NamedParameter
from forge_trainer.optim.parameters import trainable as trainable

from forge_trainer.optim.adamw import AdamWConfig as AdamWConfig  # isort: skip
from forge_trainer.optim.lion import LionConfig as LionConfig  # isort: skip
from forge_trainer.optim.muon import MuonConfig as MuonConfig  # isort: skip
from forge_trainer.optim.schedule_free import ScheduleFreeAdamWConfig as ScheduleFreeAdamWConfig  # isort: skip

__all__ = [
    "AdamWConfig",
    "GroupRule",
    "LionConfig",
    "MuonConfig",
    "NamedParameter",
    "OptimizerConfig",
    "ScheduleFreeAdamWConfig",
    "optimizers",
    "trainable",
]
