"""What may stop a run: each guard judges every step on its rank, `agree` makes it one decision."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from forge_resilience.deadline import Deadline
from forge_resilience.finite import FiniteGuard
from forge_resilience.signals import Signals
from forge_resilience.spike import SpikeGuard
from forge_resilience.verdict import Verdict

from forge_trainer.hooks.base import Hook
from forge_trainer.job import Job
from forge_trainer.ladder import Ladder, Rollback
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
    until: Callable[[], int]

    def due(self, progress: Progress) -> bool:
        """Whether a checkpoint is due after this step."""
        return progress.step % self.steps == 0 or progress.step == self.until()

    def __call__(self, progress: Progress, out: StepOutput) -> Verdict:
        """See `Guard`."""
        return Verdict.SAVE if self.due(progress) else Verdict.CONTINUE


class Count(Hook):
    """Counts each step before other hooks look at the counts."""

    span = "log"

    def __init__(self, finite: FiniteGuard, spikes: SpikeGuard) -> None:
        self._finite, self._spikes = finite, spikes

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """See `Hook.on_step`."""
        self._finite.count(out.finite, progress.step)
        self._spikes.count(out.loss, progress.step)


@dataclass
class Judges:
    """The guards of a run, and what they count and learn.

    Attributes:
        guards: what judges each step.
        deadline: to be told how long things take.
        finite: counts steps that were not finite.
        spikes: looks for losses out of range.
        ladder: says what follows trouble.
    """

    guards: list[Guard]
    deadline: Deadline
    finite: FiniteGuard
    spikes: SpikeGuard
    ladder: Ladder


def build_guards(job: Job, signals: Signals, taken: Sequence[Rollback], until: Callable[[], int]) -> Judges:
    """The guards of a job. No checkpoint is written of what is to be given up.

    Args:
        job: the configuration.
        signals: entered.
        taken: the rollbacks of the run so far.
        until: the step to end at.
    """
    config = job.resilience
    deadline = Deadline(config.max_runtime_s, config.save_margin_s)
    finite = FiniteGuard(config.max_bad_steps, config.check_every_steps)
    spikes = SpikeGuard(
        config.spike_deviations, config.spike_window, config.spike_steps, config.check_every_steps
    )
    ladder = Ladder(config, finite, spikes, taken)
    save = SaveEvery(job.checkpoint.every_steps, until)
    guards: list[Guard] = [
        save,
        lambda progress, out: signals.verdict(),
        lambda progress, out: deadline.verdict(save.due(progress)),
        lambda progress, out: ladder.verdict(
            progress.step, read=save.due(progress), last=progress.step == until()
        ),
    ]
    return Judges(guards, deadline, finite, spikes, ladder)
