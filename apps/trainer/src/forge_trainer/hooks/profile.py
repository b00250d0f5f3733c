"""Profiles a few steps on chosen ranks: where their time goes, and what the memory of the device holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from forge_config import ConfigError, Meta

from forge_trainer.hooks.base import Hook, HookConfig, RunView, hooks


@hooks.register("profile")
class ProfileConfig(HookConfig):
    """Writes a trace, `summary.md` and `summary.json` to `<run>/profile/step-00000010/rank-0`.

    `trace.json.gz` opens in https://ui.perfetto.dev or `chrome://tracing`. Training computes the same bits
    with and without this hook; profiled steps take longer, most of all short ones on a CPU. A profile that
    cannot be written is a warning. A start that begins inside of a window profiles what is left of it.

    Attributes:
        every_steps: distance from the begin of one window to that of the next; 0 means that there is but one.
        first_step: the first step of the first window, counted from 1 as in the log; later than the steps
            that compile and warm up.
        steps: of a window.
        ranks: that are profiled, each for itself.
        details: `shapes` of the inputs of operations, by which the summary tells matmuls apart; `stacks` of
            Python; `memory` that each operation takes. All but the first make traces much larger.
        snapshot_step: what the memory of the GPU holds after this step and what took and gave back memory in
            it, as `memory-step-00000010-rank-0.pickle` for https://pytorch.org/memory_viz.
        snapshot_on_oom: the same when memory runs out, as `memory-out-rank-0.pickle`; costs a record of each
            allocation in every step.
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
            ConfigError: a window begins after the run, a rank does not exist, there is no GPU whose memory
                could be written, or another hook of this type is there.
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
        """The window that a step belongs to, from 1."""
        late = step - self.first_step
        if late < 0:
            return None
        begin = self.first_step + (late // self.every_steps * self.every_steps if self.every_steps else 0)
        found = range(begin, begin + self.steps)
        return found if step in found else None
