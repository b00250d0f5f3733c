"""What a hook is: it observes a run every so many steps and cannot stop it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from forge_config import ALL_KEYS, Config, Meta, Registry

if TYPE_CHECKING:
    from forge_trainer.build import Run
    from forge_trainer.progress import Progress
    from forge_trainer.step import StepOutput


class Hook:
    """Observes a run. All ranks call it at the same steps, so a hook may use collectives.

    Attributes:
        every: distance of calls in steps; the last step of the run is always observed.
    """

    every: int = 1

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """Look at the state after a step."""

    def close(self) -> None:
        """Let go of what was opened; called when the run ends, however it ends."""


class HookConfig(Config):
    """Interface of `[hooks.<name>]`; join with `@hooks.register("my-type")` in a module named in `imports`.

    Attributes:
        every_steps: distance of calls; the last step of the run is always observed.
    """

    free_keys = (ALL_KEYS,)

    every_steps: Annotated[int, Meta(ge=1)] = 1

    def build(self, run: Run) -> Hook:
        """The hook for a built run."""
        raise NotImplementedError


hooks = Registry("hook", HookConfig)
