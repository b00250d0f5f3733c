"""The guards that may stop a run: each judges every step on its rank, `agree` makes one decision of them."""

from __future__ import annotations

import torch
from forge_parallel.tensor import local_part
from forge_resilience.config import ResilienceConfig
from forge_resilience.deadline import Deadline
from forge_resilience.exit_codes import ExitCode
from forge_resilience.finite import LAST_STEPS, NonFiniteCounter
from forge_resilience.signals import Signals
from forge_resilience.spike import SpikeCounter
from forge_resilience.verdict import Verdict, agree
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from forge_trainer.progress import Progress
from forge_trainer.recovery.incidents import Trouble
from forge_trainer.recovery.recovery import Recovery
from forge_trainer.steps.base import StepOutput


class Guard:
    """The interface of a guard. All ranks call it at the same steps.

    A guard that counts something has two more methods, `state()` and `load_state(state)` (see
    `forge_trainer.progress.Stateful`), and a `name` under which a checkpoint keeps it.

    Attributes:
        name: name of its counts in a checkpoint; empty for a guard without counts.
        span: clock span that counts the time of `observe`; empty for a guard that observes nothing.
    """

    name: str = ""
    span: str = "log"

    def observe(self, progress: Progress, out: StepOutput) -> None:
        """Look at a step, before hooks do. May use collectives; must not wait for the device every step."""

    def verdict(self, progress: Progress, save_due: bool) -> Verdict:
        """The verdict of this rank on the steps so far. No collective.

        Args:
            progress: progress of the run.
            save_due: whether a checkpoint follows in any case; then values on the device must be read now.
        """
        return Verdict.CONTINUE

    def before_save(self, progress: Progress) -> Verdict:
        """Judge the state before a checkpoint; CONTINUE if it is worth saving. Collective."""
        return Verdict.CONTINUE

    def suspect_steps(self) -> int:
        """Return how many of the last steps may be the beginning of trouble. Waits for the device."""
        return 0

    def rewind(self, progress: Progress) -> None:
        """Continue from an earlier step after a rollback."""


class SaveDue(Guard):
    """Requests a checkpoint when one is due."""

    span = ""

    def verdict(self, progress: Progress, save_due: bool) -> Verdict:
        """See `Guard.verdict`."""
        return Verdict.SAVE if save_due else Verdict.CONTINUE


class Stopping(Guard):
    """Stops the run when a signal asks for it."""

    span = ""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals

    def verdict(self, progress: Progress, save_due: bool) -> Verdict:
        """See `Guard.verdict`."""
        return self._signals.verdict()


class TimeLimit(Guard):
    """Stops the run while there is time for a last checkpoint."""

    span = ""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def verdict(self, progress: Progress, save_due: bool) -> Verdict:
        """See `Guard.verdict`."""
        return self._deadline.verdict(save_due)


class NotFinite(Guard):
    """Reports trouble if too many steps in a row are not finite, or a weight is not finite before a save.

    Args:
        config: the largest number of steps in a row, `max_bad_steps`.
        recovery: decides what follows.
        optimizer: optimizer of the parameters that are checked.
        group: process group of all ranks, on the CPU.
    """

    name = "finite"

    def __init__(
        self,
        config: ResilienceConfig,
        recovery: Recovery,
        optimizer: Optimizer,
        group: ProcessGroup | None,
    ) -> None:
        self._limit, self._recovery, self._group = config.max_bad_steps, recovery, group
        self._optimizer = optimizer
        self._counts = NonFiniteCounter(config.max_bad_steps, config.check_every_steps)

    def observe(self, progress: Progress, out: StepOutput) -> None:
        """See `Guard.observe`."""
        self._counts.count(out.finite, progress.step)

    def verdict(self, progress: Progress, save_due: bool) -> Verdict:
        """See `Guard.verdict`."""
        if self._counts.verdict(progress.step, save_due, progress.complete) is not Verdict.ABORT:
            return Verdict.CONTINUE
        why = (
            "too many steps in a row were not finite, or had no target (resilience.max_bad_steps = "
            f"{self._limit}; {LAST_STEPS} at the end of a run)"
        )
        return self._recovery.judge(Trouble(*self._counts.worst_steps(), why, ExitCode.NOT_FINITE))

    def before_save(self, progress: Progress) -> Verdict:
        """See `Guard.before_save`: a checkpoint contains only finite weights."""
        mine = Verdict.CONTINUE if self._all_finite() else Verdict.ABORT
        if agree(mine, self._group) is Verdict.CONTINUE:
            return Verdict.CONTINUE
        why = "a weight is not finite"
        return self._recovery.judge(Trouble(progress.step - 1, progress.step, why, ExitCode.NOT_FINITE))

    def skipped(self) -> int:
        """Return the number of steps of the run that were not finite. Waits for the device."""
        return self._counts.skipped()

    def suspect_steps(self) -> int:
        """See `Guard.suspect_steps`."""
        return self._counts.in_a_row()

    def state(self) -> dict[str, int]:
        """State for the checkpoint. Waits for the device."""
        return self._counts.state()

    def load_state(self, state: dict[str, int]) -> None:
        """Restore the result of `state`."""
        self._counts.load_state(state)

    @torch.no_grad()
    def _all_finite(self) -> bool:
        parameters: list[Tensor] = [p for group in self._optimizer.param_groups for p in group["params"]]
        found = [torch.isfinite(local_part(p)).all() for p in parameters]
        return not found or bool(torch.stack(found).all())


class Spikes(Guard):
    """Reports trouble if the loss stays out of its range.

    Args:
        config: the range of the loss.
        recovery: decides what follows.
    """

    name = "spikes"

    def __init__(self, config: ResilienceConfig, recovery: Recovery) -> None:
        self._recovery = recovery
        self._losses = SpikeCounter(
            config.spike_deviations, config.spike_window, config.spike_steps, config.check_every_steps
        )

    def observe(self, progress: Progress, out: StepOutput) -> None:
        """See `Guard.observe`."""
        self._losses.count(out.loss, progress.step)

    def verdict(self, progress: Progress, save_due: bool) -> Verdict:
        """See `Guard.verdict`."""
        if self._losses.verdict(progress.step, save_due or progress.complete) is not Verdict.ABORT:
            return Verdict.CONTINUE
        first, end = self._losses.trouble()
        why = f"the loss was out of its range for {end - first} steps (resilience.spike_deviations)"
        return self._recovery.judge(Trouble(first, end, why, ExitCode.DIVERGED))

    def suspect_steps(self) -> int:
        """See `Guard.suspect_steps`."""
        return self._losses.in_a_row()

    def state(self) -> dict[str, object]:
        """State for the checkpoint. Waits for the device."""
        return self._losses.state()

    def load_state(self, state: dict[str, object]) -> None:
        """Restore the result of `state`."""
        self._losses.load_state(state)
