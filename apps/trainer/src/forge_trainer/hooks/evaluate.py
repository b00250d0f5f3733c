"""Evaluates on the held-out text every N steps."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from forge_trainer.hooks.base import Hook, RunView
from forge_trainer.progress import Progress
from forge_trainer.steps.base import Batch, StepOutput


class Evaluate(Hook):
    """Logs what the step says about held-out batches, under `eval/`. Collective.

    Args:
        every: distance in steps.
        run: what is looked at.
        batches: a finite pass, each time.
        weights: parameters hold the weights to evaluate inside of it.
    """

    span = "evaluate"

    def __init__(
        self,
        every: int,
        run: RunView,
        batches: Iterable[Batch],
        weights: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.every = every
        self._weights = weights
        self._run = run
        self._batches = batches

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """See `Hook.on_step`. Collective."""
        with self._weights():
            results = self._run.step.evaluate(self._batches)
        record = {"step": progress.step, "tokens": progress.tokens}
        record |= {f"eval/{name}": value for name, value in results.items()}
        for tracker in self._run.trackers:
            tracker.log(record)
