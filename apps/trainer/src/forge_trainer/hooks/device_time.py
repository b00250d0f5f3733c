"""How long the device takes for each part of a step."""

from __future__ import annotations

from typing import Annotated

from forge_config import Meta

from forge_trainer.hooks.base import Hook, HookConfig, RunView, hooks


@hooks.register("device-time")
class DeviceTimeConfig(HookConfig):
    """Logs `device/<part>_s`: the seconds a step that the device of the first rank takes for a part of it.

    Parts are the spans of `time/<part>_s`, which tell of the host, and `optimizer`. A GPU is behind its host:
    events are put into its queue at the ends of each part, and their times are read later, so that nothing
    waits. A part lasts from when the device comes to its begin to when it comes to its end, at work or not.
    On a CPU it is the time of the host.

    Attributes:
        every_steps: distance of what is logged, the mean since the last time.
    """

    every_steps: Annotated[int, Meta(ge=1)] = 10

    def build(self, run: RunView) -> Hook:
        """See `HookConfig.build`."""
        from forge_trainer.profile.device_time import DeviceTime

        return DeviceTime(run, self.every_steps)
