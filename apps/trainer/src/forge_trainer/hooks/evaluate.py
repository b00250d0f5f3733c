"""Evaluates on the held-out text every N steps."""

from collections.abc import Callable, Sequence

from forge_trainer.clock import Clock
from forge_trainer.hooks.base import Hook
from forge_trainer.progress import Progress
from forge_trainer.step import StepOutput
from forge_trainer.track import Tracker


class Evaluate(Hook):
    """Logs what `evaluate` returns under `eval/`. Collective."""

    def __init__(
        self, every: int, evaluate: Callable[[], dict[str, float]], trackers: Sequence[Tracker], clock: Clock
    ) -> None:
        self.every = every
        self._evaluate = evaluate
        self._trackers = trackers
        self._clock = clock

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """See `Hook.on_step`. Collective."""
        with self._clock.paused():
            results = self._evaluate()
        record = {"step": progress.step, "tokens": progress.tokens}
        record |= {f"eval/{name}": value for name, value in results.items()}
        for tracker in self._trackers:
            tracker.log(record)
