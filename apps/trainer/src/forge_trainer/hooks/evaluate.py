"""Evaluates on the held-out text every N steps."""

from collections.abc import Iterable

from forge_trainer.hooks.base import Hook, RunView
from forge_trainer.progress import Progress
from forge_trainer.steps.base import Batch, StepOutput


class Evaluate(Hook):
    """Logs what the step says about held-out batches, under `eval/`. Collective."""

    span = "evaluate"

    def __init__(self, every: int, run: RunView, batches: Iterable[Batch]) -> None:
        self.every = every
        self._run = run
        self._batches = batches

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """See `Hook.on_step`. Collective."""
        results = self._run.step.evaluate(self._batches)
        record = {"step": progress.step, "tokens": progress.tokens}
        record |= {f"eval/{name}": value for name, value in results.items()}
        for tracker in self._run.trackers:
            tracker.log(record)
