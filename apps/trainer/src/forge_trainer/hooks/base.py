"""What a hook is: it observes a run every so many steps and cannot stop it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Protocol

from forge_config import ALL_KEYS, Config, Meta, Registry

if TYPE_CHECKING:
    from pathlib import Path

    from forge_parallel.env import Env
    from forge_parallel.mesh import Mesh
    from torch import nn

    from forge_trainer.clock import Clock
    from forge_trainer.job import Job
    from forge_trainer.progress import Progress
    from forge_trainer.steps import Step, StepOutput
    from forge_trainer.track import Tracker


class RunView(Protocol):
    """What a hook may see of a run. It must change none of it, but may log to the trackers.

    Attributes:
        job: the configuration.
        directory: where the run writes.
        env: the place of this process among the ranks.
        mesh: the grid of ranks, with `mesh.device`.
        parts: the parts of the model that this rank holds; one, without a pipeline.
        step: trains and evaluates.
        progress: how far the run has come.
        trackers: where metrics go; empty on all ranks but the first.
        clock: how long what took.
    """

    @property
    def job(self) -> Job: ...  # noqa: D102
    @property
    def directory(self) -> Path: ...  # noqa: D102
    @property
    def env(self) -> Env: ...  # noqa: D102
    @property
    def mesh(self) -> Mesh: ...  # noqa: D102
    @property
    def parts(self) -> Sequence[nn.Module]: ...  # noqa: D102
    @property
    def step(self) -> Step: ...  # noqa: D102
    @property
    def progress(self) -> Progress: ...  # noqa: D102
    @property
    def trackers(self) -> Sequence[Tracker]: ...  # noqa: D102
    @property
    def clock(self) -> Clock: ...  # noqa: D102


class Hook:
    """Observes a run. All ranks call it at the same steps, so a hook may use collectives.

    Attributes:
        every: distance of calls in steps; the last step of the run is always observed.
        span: the name under which its time is counted.
    """

    every: int = 1
    span: str = "hooks"

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """Look at the state after a step."""

    def rewind(self, progress: Progress) -> None:
        """Go on from an earlier step: the run was taken back to a checkpoint."""

    def close(self) -> None:
        """Let go of what was opened; called when the run ends, however it ends."""


class HookConfig(Config):
    """Interface of `[hooks.<name>]`; join with `@hooks.register("my-type")` in a module named in `imports`.

    Attributes:
        every_steps: distance of calls; the last step of the run is always observed.
    """

    free_keys = (ALL_KEYS,)

    every_steps: Annotated[int, Meta(ge=1)] = 1

    def build(self, run: RunView) -> Hook:
        """The hook for a built run. Collective."""
        raise NotImplementedError


hooks = Registry("hook", HookConfig)
