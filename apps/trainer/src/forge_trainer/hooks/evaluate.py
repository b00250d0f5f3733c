"""Evaluates on the held-out text and the evaluation sets every N steps."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

from forge_trainer.config.eval import prefixed
from forge_trainer.hooks.base import Hook, RunView
from forge_trainer.progress import Progress
from forge_trainer.steps.base import Batch, StepOutput


class Evaluate(Hook):
    """A hook that logs the metrics of each set under `eval/` or `eval/<set>/`. Collective.

    Args:
        every: steps between evaluations.
        run: the run.
        sets: finite passes by the name of the set, repeatable; the name of the held-out text is empty.
        weights: a context inside which the parameters hold the weights to evaluate.
        on_results: called with the results.
    """

    span = "evaluate"

    def __init__(
        self,
        every: int,
        run: RunView,
        sets: Mapping[str, Iterable[Batch]],
        weights: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_results: Callable[[Progress, Mapping[str, float]], None] = lambda progress, results: None,
    ) -> None:
        self.every = every
        self._weights, self._on_results = weights, on_results
        self._run = run
        self._sets = sets

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """See `Hook.on_step`. Collective."""
        results: dict[str, float] = {}
        with self._weights():
            for name, batches in self._sets.items():
                results |= prefixed(name, self._run.step.evaluate(batches))
        self._run.log(results)
        self._on_results(progress, results)
