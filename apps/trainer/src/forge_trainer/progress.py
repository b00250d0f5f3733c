"""The progress of a run: a few integers that, with the tensors, are its whole state."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from forge_trainer.steps.base import StepOutput


@dataclass
class Progress:
    """Counts over the whole run, the same on every rank.

    Attributes:
        step: optimizer steps taken, skipped ones (non-finite gradient) included.
        samples: sequences consumed; the position in the data.
        tokens: tokens consumed.
        until: the step to end at: `train.steps`, or an earlier step at which the data end.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    until: int = field(default=sys.maxsize, compare=False)

    @property
    def complete(self) -> bool:
        """Whether there is no further step to take."""
        return self.step >= self.until

    def counts(self) -> dict[str, int]:
        """Return the state for the checkpoint."""
        return {"step": self.step, "samples": self.samples, "tokens": self.tokens}

    def advance(self, out: StepOutput) -> None:
        """Count one step."""
        self.step += 1
        self.samples += out.samples
        self.tokens += out.tokens

    def become(self, other: Progress) -> None:
        """Take over the counts of `other`; the end stays the same."""
        self.step, self.samples, self.tokens = other.step, other.samples, other.tokens


@runtime_checkable
class Stateful(Protocol):
    """A guard, a hook or another part of a run whose counts must survive a restart."""

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint, as JSON; equal on all ranks, or present on the first only."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""
        ...
