"""The interface of a hook: it observes a run every few steps and decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from forge_config import ALL_KEYS, Config, Meta, Registry

if TYPE_CHECKING:
    from pathlib import Path

    from forge_parallel.config import MeshConfig
    from forge_parallel.env import Env
    from forge_parallel.mesh import Mesh
    from forge_resilience.verdict import Verdict
    from torch import nn
    from torch.optim import Optimizer

    from forge_trainer.clock import Clock
    from forge_trainer.config.job import Job
    from forge_trainer.progress import Progress
    from forge_trainer.steps import Step, StepOutput
    from forge_trainer.track import Tracker


class RunView(Protocol):
    """The view of a run that a hook gets. A hook must not change the run, but may log to the trackers.

    Attributes:
        job: the configuration; `progress.until` is the last step if data end before `job.train.steps`.
        directory: the run directory.
        env: rank, world size and device of this process.
        mesh: the grid of ranks, with `mesh.device`.
        parts: this rank's parts of the model; without a pipeline, a single one.
        optimizer: the optimizer of the parts.
        step: trains on a batch, and evaluates.
        progress: the counts of steps, samples and tokens.
        trackers: destinations of metrics; empty on all ranks but the first.
        clock: measures where the time goes.
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
    def optimizer(self) -> Optimizer: ...  # noqa: D102
    @property
    def step(self) -> Step: ...  # noqa: D102
    @property
    def progress(self) -> Progress: ...  # noqa: D102
    @property
    def trackers(self) -> Sequence[Tracker]: ...  # noqa: D102
    @property
    def clock(self) -> Clock: ...  # noqa: D102

    def log(self, values: Mapping[str, Any]) -> None:
        """Log numbers by name to all trackers, under the present step of the run.

        Values that are no numbers are left out with a warning. Waits for numbers on the device. Without
        effect on all ranks but the first.
        """
        ...


class Hook:
    """The base class of hooks. All ranks call a hook at the same steps, so it may use collectives.

    A hook with state has two more methods, `state()` and `load_state(state)` (see
    `forge_trainer.progress.Stateful`). A checkpoint contains the result of `state()` on the first rank, as
    JSON; a run that continues from it passes this to `load_state` on all ranks, before `on_start`.

    Attributes:
        every: steps between calls of `on_step`; the last step of the run is always observed.
        span: clock span that counts its time.
        name: name of its table in the configuration; empty for hooks that a run always has.
    """

    every: int = 1
    span: str = "hooks"
    name: str = ""

    def on_start(self, progress: Progress) -> None:
        """Observe the run before its first step in this process; `progress.step` is 0 or a checkpoint's."""

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """Observe the state after a step."""

    def on_eval(self, progress: Progress, results: Mapping[str, float]) -> None:
        """Observe the numbers of an evaluation, by their names in the log, equal on all ranks.

        Called once with the numbers of the sets of a run, and once with the numbers of its tasks.
        """

    def on_save(self, progress: Progress) -> None:
        """Observe the run before a checkpoint of this step is written; `state` is called afterwards."""

    def on_end(self, progress: Progress, verdict: Verdict) -> None:
        """Observe the run after the last step of this process, also if it was stopped; not after an error.

        Args:
            progress: progress of the run.
            verdict: CONTINUE if the run is complete; STOP or ABORT if it was cut short.
        """

    def rewind(self, progress: Progress) -> None:
        """Continue from an earlier step after a rollback."""

    def close(self) -> None:
        """Release all resources; called at the end of a run, also after an error."""


class HookConfig(Config):
    """Interface of `[hooks.<name>]`; register with `@hooks.register("my-type")` in a module of `imports`.

    Attributes:
        every_steps: steps between calls; the last step of the run is always observed.
    """

    free_keys = (ALL_KEYS,)

    every_steps: Annotated[int, Meta(ge=1)] = 1

    def require_mesh(self, mesh: MeshConfig) -> None:
        """Check that the hook supports a mesh; called before anything is built.

        Raises:
            ValueError: the hook does not support it.
        """

    def build(self, run: RunView) -> Hook:
        """Build the hook for a built run. Collective."""
        raise NotImplementedError


hooks = Registry("hook", HookConfig)
