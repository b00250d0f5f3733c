"""Repeats a step that was not finite with the same inputs, to tell hardware errors from bad data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from forge_trainer.steps.base import Batch, Step, StepOutput


@dataclass
class Repeated:
    """A step that is checked every few steps, and repeated if it was not finite.

    A step that is not finite changes nothing, so the second attempt has the same weights, batch and random
    numbers. If it is finite, its result counts: the first attempt failed because of hardware, or of an
    operation that is not deterministic. Of several checked steps in a row that are not finite, only the
    first is repeated. All ranks see the same flag, and so all repeat.

    Attributes:
        step: the step that trains.
        every: steps between checks; each check waits for the device.
        on_repeated: called with the number of a repeated step, and whether the repetition was finite.
    """

    step: Step
    every: int
    on_repeated: Callable[[int, bool], None]
    _lasts: bool = field(default=False, init=False)  # the trouble, which one attempt has explained

    def train(self, batch: Batch, step: int) -> StepOutput:
        """See `Step.train`."""
        out = self.step.train(batch, step)
        if (step + 1) % self.every:
            return out
        before, self._lasts = self._lasts, not out.finite.item()
        if before or not self._lasts:
            return out
        again = self.step.train(batch, step)
        self._lasts = not again.finite.item()
        self.on_repeated(step, not self._lasts)
        return again

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """See `Step.evaluate`."""
        return self.step.evaluate(batches)


def meaning_of_repetition(finite: bool, exact: bool) -> str:
    """Explain the result of repeating a step that was not finite.

    Args:
        finite: whether the second attempt was finite.
        exact: whether all kernels give the same bits each time.
    """
    if not finite:
        return "was not finite again: the data, or the numbers of the run, and not the hardware"
    if exact:
        return "was finite then: suspect the hardware of one of the hosts, or an operation that is random"
    return (
        "was finite then: kernels that add in another order each time can do so, and so can hardware; with "
        "job.deterministic = true only hardware can"
    )
