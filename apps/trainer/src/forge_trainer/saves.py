"""At which steps a checkpoint is due."""

from __future__ import annotations

import time
from collections.abc import Callable

from forge_ckpt.config import CheckpointConfig
from forge_resilience.goodput import PRIOR_S, save_every_s
from torch.distributed import ProcessGroup

from forge_trainer.ranks import from_first

FIRST_STEPS = 20
"""With "auto", the first checkpoint of a start comes after so many steps: until then nothing is measured."""


class Saves:
    """Every N steps, or as often as it is worth it; and at the end. All ranks hold the same.

    Args:
        config: says how far apart they are; milestones and dense windows are due as well.
        step: steps taken so far.
        until: the step to end at.
        group: of all ranks, on the CPU.

    Attributes:
        mean_time_to_failure_s: of the run, asked on the first rank.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        step: int,
        until: Callable[[], int],
        group: ProcessGroup | None,
    ) -> None:
        self.mean_time_to_failure_s: Callable[[], float] = lambda: PRIOR_S
        self._every, self._milestones = config.every_steps, config.keep_every_steps
        self._is_dense, self._until, self._group = config.is_dense, until, group
        self._next = step + FIRST_STEPS
        self._stalls: list[float] = []
        self._last = step, time.monotonic()

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after so many steps."""
        if step == self._until() or self._is_dense(step):
            return True
        if self._milestones and step % self._milestones == 0:
            return True
        return step % self._every == 0 if isinstance(self._every, int) else step >= self._next

    def rewind(self, step: int) -> None:
        """The run goes on from an earlier step."""
        self._next, self._last = step + FIRST_STEPS, (step, time.monotonic())

    def saved(self, step: int, stall_s: float) -> None:
        """Learn how long training has waited for a checkpoint. Collective with "auto"."""
        if self._every == "auto":
            self._next = step + from_first(lambda: self._distance(step, stall_s), self._group)

    def _distance(self, step: int, stall_s: float) -> int:
        now, (last_step, last_s) = time.monotonic(), self._last
        self._last = step, now
        self._stalls = [*self._stalls[-9:], stall_s]
        step_s = max(1e-6, (now - stall_s - last_s) / max(1, step - last_step))
        stall = sum(self._stalls) / len(self._stalls)
        return max(1, round(save_every_s(stall, self.mean_time_to_failure_s()) / step_s))
