"""What may stop a run: each guard judges every step on its rank, `agree` makes it one decision."""

from dataclasses import dataclass
from typing import Protocol

from forge_resilience.verdict import Verdict

from forge_trainer.progress import Progress
from forge_trainer.step import StepOutput


class Guard(Protocol):
    """Judges a step. Must not use collectives and must not wait for the device."""

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
