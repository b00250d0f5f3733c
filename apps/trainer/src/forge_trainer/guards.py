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
from forge_trainer.progress import Progress, Stateful
from forge_trainer.saves import Saves
from forge_trainer.steps.base import StepOutput


class Guard(Protocol):
    """Judges a step. Must not use collectives and must not wait for the device more than now and then."""

    def __call__(self, progress: Progress, out: StepOutput) -> Verdict:
        """The verdict of this rank."""
        ...


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
        saves: knows when a checkpoint is due.
    """

    guards: list[Guard]
    deadline: Deadline
    finite: FiniteGuard
    spikes: SpikeGuard
    ladder: Ladder
    saves: Saves

    def counters(self) -> dict[str, Stateful]:
        """Those whose counts are saved, by name."""
        return {"finite": self.finite, "spikes": self.spikes}


def build_guards(
    job: Job, signals: Signals, taken: Sequence[Rollback], saves: Saves, until: Callable[[], int]
) -> Judges:
    """The guards of a job. No checkpoint is written of what is to be given up.

    Args:
        job: the configuration.
        signals: entered.
        taken: the rollbacks of the run so far.
        saves: says when a checkpoint is due.
        until: the step to end at.
    """
    config = job.resilience
    deadline = Deadline(config.max_runtime_s, config.save_margin_s)
    finite = FiniteGuard(config.max_bad_steps, config.check_every_steps)
    spikes = SpikeGuard(
        config.spike_deviations, config.spike_window, config.spike_steps, config.check_every_steps
    )
    ladder = Ladder(config, finite, spikes, taken)
    guards: list[Guard] = [
        lambda progress, out: Verdict.SAVE if saves.due(progress.step) else Verdict.CONTINUE,
        lambda progress, out: signals.verdict(),
        lambda progress, out: deadline.verdict(saves.due(progress.step)),
        lambda progress, out: ladder.verdict(
            progress.step, read=saves.due(progress.step), last=progress.step == until()
        ),
    ]
    return Judges(guards, deadline, finite, spikes, ladder, saves)
