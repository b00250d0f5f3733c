"""Measures how long the device takes for each part of a step."""

from __future__ import annotations

from typing import Annotated

from forge_config import Meta

from forge_trainer.hooks.base import Hook, HookConfig, RunView, hooks


@hooks.register("device-time")
class DeviceTimeConfig(HookConfig):
    """Logs `device/<part>_s`: the seconds that each part of a step takes on the device of the first rank.

    Parts are `optimizer` and the spans of `time/<part>_s`, which are times of the host. A GPU runs behind its
    host: this hook puts events into its queue at the ends of each part and reads their times later, without
    waiting. A part lasts from its first event to its last on the device, including idle time. On a CPU it is
    the time of the host.

    Attributes:
        every_steps: steps between log entries; each is the mean since the last one.
    """

    every_steps: Annotated[int, Meta(ge=1)] = 10

    def build(self, run: RunView) -> Hook:
        """See `HookConfig.build`."""
        from forge_trainer.profile.device_time import DeviceTime

        return DeviceTime(run, self.every_steps)
