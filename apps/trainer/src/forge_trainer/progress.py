"""How far a run has come: the few integers that, with the tensors, are its whole state."""

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
        until: the step to end at: that of the configuration, or the last one for which there are data.
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
        """State for the checkpoint."""
        return {"step": self.step, "samples": self.samples, "tokens": self.tokens}

    def advance(self, out: StepOutput) -> None:
        """Count one step."""
        self.step += 1
        self.samples += out.samples
        self.tokens += out.tokens

    def become(self, other: Progress) -> None:
        """Go on from another place, to the same end."""
        self.step, self.samples, self.tokens = other.step, other.samples, other.tokens


@runtime_checkable
class Stateful(Protocol):
    """A part of a run, a guard or a hook, that counts something which must survive a restart."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON; the same on every rank, or of the first rank only."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""
        ...
