"""Hooks observe a run: their interface, and the registry of `[hooks.<name>]`."""

from forge_trainer.hooks.base import Hook as Hook
from forge_trainer.hooks.base import HookConfig as HookConfig
from forge_trainer.hooks.base import hooks as hooks

from forge_trainer.hooks.by_path import ClassHookConfig as ClassHookConfig  # isort: skip
from forge_trainer.hooks.device_time import DeviceTimeConfig as DeviceTimeConfig  # isort: skip
from forge_trainer.hooks.expert_load import ExpertLoadConfig as ExpertLoadConfig  # isort: skip
from forge_trainer.hooks.norms import NormsConfig as NormsConfig  # isort: skip
from forge_trainer.hooks.profile import ProfileConfig as ProfileConfig  # isort: skip
from forge_trainer.hooks.record import RecordConfig as RecordConfig  # isort: skip

__all__ = [
    "ClassHookConfig",
    "DeviceTimeConfig",
    "ExpertLoadConfig",
    "Hook",
    "HookConfig",
    "NormsConfig",
    "ProfileConfig",
    "RecordConfig",
    "hooks",
]
