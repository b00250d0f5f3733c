"""What may stop a run: each guard judges every step on its rank, `agree` makes it one decision."""

from dataclasses import dataclass
from typing import Protocol

from forge_resilience.deadline import Deadline
from forge_resilience.finite import FiniteGuard
from forge_resilience.signals import Signals
from forge_resilience.verdict import Verdict

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

    def __call__(self, progress: Progress, out: StepOutput) -> Verdict:
        """See `Guard`."""
        due = progress.step % self.steps == 0 or progress.step == self.until
        return Verdict.SAVE if due else Verdict.CONTINUE


def build_guards(job: Job, signals: Signals) -> tuple[list[Guard], Deadline]:
    """The guards of a job, and the deadline, which learns from saves."""
    config = job.resilience
    deadline = Deadline(config.max_runtime_s, config.save_margin_s)
    finite = FiniteGuard(config.max_bad_steps, config.check_every_steps)
    guards: list[Guard] = [
        SaveEvery(job.checkpoint.every_steps, job.train.steps),
        lambda progress, out: signals.verdict(),
        lambda progress, out: deadline.verdict(),
        lambda progress, out: finite.verdict(progress.step, out.finite),
    ]
    return guards, deadline
