"""Profiles a few steps on chosen ranks: where their time goes, and which memory the device uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from forge_config import ConfigError, Meta

from forge_trainer.hooks.base import Hook, HookConfig, RunView, hooks


@hooks.register("profile")
class ProfileConfig(HookConfig):
    """Writes a trace, `summary.md` and `summary.json` to `<run>/profile/step-00000010/rank-0`.

    `trace.json.gz` opens in https://ui.perfetto.dev or `chrome://tracing`. Training computes the same bits
    with and without this hook; profiled steps take longer, above all short steps on a CPU. A profile that
    cannot be written causes a warning. A start that begins inside a window profiles the rest of the window.

    Attributes:
        every_steps: steps from the beginning of a window to the beginning of the next; 0 means one window.
        first_step: the first step of the first window, counted from 1 as in the log; later than the steps
            that compile and warm up.
        steps: length of a window, in steps.
        ranks: ranks that are profiled, each separately.
        details: details of the trace: input `shapes`, by which the summary distinguishes matmuls;
            Python `stacks`; `memory` of each operation. All but the first make traces much larger.
        snapshot_step: step after which the GPU memory in use and the allocations of the step are written, to
            `memory-step-00000010-rank-0.pickle` for https://pytorch.org/memory_viz.
        snapshot_on_oom: whether to write `memory-out-rank-0.pickle` when memory runs out; then every step
            records each allocation.
    """

    every_steps: Annotated[int, Meta(ge=0)] = 0
    first_step: Annotated[int, Meta(ge=1)] = 10
    steps: Annotated[int, Meta(ge=1)] = 3
    ranks: tuple[Annotated[int, Meta(ge=0)], ...] = (0,)
    details: tuple[Literal["shapes", "stacks", "memory"], ...] = ("shapes",)
    snapshot_step: Annotated[int, Meta(ge=1)] | None = None
    snapshot_on_oom: bool = False

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if 0 < self.every_steps < self.steps:
            yield (
                f"every_steps = {self.every_steps} and steps = {self.steps}: windows would overlap; give "
                f"every_steps = {self.steps} or more, or 0 for a single window"
            )

    def build(self, run: RunView) -> Hook:
        """See `HookConfig.build`.

        Raises:
            ConfigError: a window begins after the run, a rank does not exist, there is no GPU for a snapshot,
                or there is another hook of this type.
        """
        if problems := list(self._problems(run)):
            raise ConfigError("; ".join(problems))
        from forge_trainer.profile.hook import Profile

        return Profile(self, run)

    def _problems(self, run: RunView) -> Iterator[str]:
        kind = "a hook of type profile"
        for key in ("first_step", "snapshot_step"):
            step = getattr(self, key)
            if step is not None and step > run.job.train.steps:
                yield (
                    f"{kind} with {key} = {step} in a run of {run.job.train.steps} steps would write "
                    "nothing; give an earlier step"
                )
        if missing := [rank for rank in self.ranks if rank >= run.env.world_size]:
            yield f"{kind} with ranks = {missing} of {run.env.world_size}; ranks count from 0"
        if run.mesh.device.type != "cuda" and (self.snapshot_step is not None or self.snapshot_on_oom):
            yield f"{kind} with a snapshot of memory needs a GPU; leave out snapshot_step and snapshot_on_oom"
        if sum(isinstance(one, ProfileConfig) for one in run.job.hooks.values()) > 1:
            yield f"two hooks of type profile: torch has one profiler in a process; use every_steps of {kind}"

    def window(self, step: int) -> range | None:
        """Return the window of a step (from 1); None if it is in no window."""
        late = step - self.first_step
        if late < 0:
            return None
        begin = self.first_step + (late // self.every_steps * self.every_steps if self.every_steps else 0)
        found = range(begin, begin + self.steps)
        return found if step in found else None
