"""What a hook is: it observes a run every so many steps and decides nothing."""

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
    """What a hook may see of a run. It must change none of it, but may log to the trackers.

    Attributes:
        job: the configuration; where data end earlier than `job.train.steps`, `progress.until` says when.
        directory: where the run writes.
        env: the place of this process among the ranks.
        mesh: the grid of ranks, with `mesh.device`.
        parts: the parts of the model that this rank holds; one, without a pipeline.
        optimizer: of the parts.
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
        """Hand numbers by name to all trackers, under the step that the run has reached.

        What is no number is left out with a warning. Numbers on the device are waited for. Without effect on
        all ranks but the first.
        """
        ...


class Hook:
    """Observes a run. All ranks call it at the same steps, so a hook may use collectives.

    A hook that remembers something has two more methods, `state()` and `load_state(state)` (see
    `forge_trainer.progress.Stateful`): what the first is, as JSON on the first rank, when a checkpoint is
    written, the second is given on all ranks when a run goes on from it, before `on_start`.

    Attributes:
        every: distance of calls of `on_step`; the last step of the run is always observed.
        span: the name under which its time is counted.
        name: of its table in the configuration; empty for hooks that a run always has.
    """

    every: int = 1
    span: str = "hooks"
    name: str = ""

    def on_start(self, progress: Progress) -> None:
        """Look before the first step of this process; `progress.step` is that of a checkpoint, or 0."""

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """Look at the state after a step."""

    def on_eval(self, progress: Progress, results: Mapping[str, float]) -> None:
        """Look at the numbers of an evaluation by the names that are logged, the same on all ranks.

        Called once for the sets of the run and once for its tasks, with the numbers of each.
        """

    def on_save(self, progress: Progress) -> None:
        """Look before a checkpoint of this step is written, with what `state` is then."""

    def on_end(self, progress: Progress, verdict: Verdict) -> None:
        """Look after the last step of this process, also where it was stopped; not after an error.

        Args:
            progress: how far the run has come.
            verdict: CONTINUE where the run is complete; STOP or ABORT where it was cut short.
        """

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

    def require_mesh(self, mesh: MeshConfig) -> None:
        """See that the hook can do its work on such a mesh; asked before anything is built.

        Raises:
            ValueError: it cannot.
        """

    def build(self, run: RunView) -> Hook:
        """The hook for a built run. Collective."""
        raise NotImplementedError


hooks = Registry("hook", HookConfig)
