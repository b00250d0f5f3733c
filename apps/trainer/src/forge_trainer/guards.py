"""What may stop a run: each guard judges every step on its rank, `agree` makes it one decision."""

from dataclasses import dataclass
from typing import Protocol

from forge_resilience.deadline import Deadline
from forge_resilience.finite import FiniteGuard
from forge_resilience.signals import Signals
from forge_resilience.verdict import Verdict

from forge_trainer.hooks.base import Hook
from forge_trainer.job import Job
from forge_trainer.progress import Progress
from forge_trainer.steps.base import StepOutput


class Guard(Protocol):
    """Judges a step. Must not use collectives and must not wait for the device more than now and then."""

    def __call__(self, progress: Progress, out: StepOutput) -> Verdict:
        """The verdict of this rank."""
        ...


@dataclass
class SaveEvery:
    """Asks for a checkpoint every N steps and at the end."""

    steps: int
    until: int

    def due(self, progress: Progress) -> bool:
        """Whether a checkpoint is due after this step."""
        return progress.step % self.steps == 0 or progress.step == self.until

    def __call__(self, progress: Progress, out: StepOutput) -> Verdict:
        """See `Guard`."""
        return Verdict.SAVE if self.due(progress) else Verdict.CONTINUE


class CountFinite(Hook):
    """Counts each step before other hooks look at the count."""

    span = "log"

    def __init__(self, finite: FiniteGuard) -> None:
        self._finite = finite

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """See `Hook.on_step`."""
        self._finite.count(out.finite)


def build_guards(job: Job, signals: Signals) -> tuple[list[Guard], Deadline, FiniteGuard]:
    """The guards of a job; the deadline, to be told how long things take; and what counts skipped steps.

    No checkpoint is written of a run that is to end for steps that are not finite.
    """
    config = job.resilience
    deadline = Deadline(config.max_runtime_s, config.save_margin_s)
    finite = FiniteGuard(config.max_bad_steps, config.check_every_steps)
    save = SaveEvery(job.checkpoint.every_steps, job.train.steps)
    guards: list[Guard] = [
        save,
        lambda progress, out: signals.verdict(),
        lambda progress, out: deadline.verdict(save.due(progress)),
        lambda progress, out: finite.verdict(
            progress.step, read=save.due(progress), last=progress.step == job.train.steps
        ),
    ]
    return guards, deadline, finite
