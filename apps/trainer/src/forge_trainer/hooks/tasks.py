"""Evaluates on tasks of lm-evaluation-harness every N steps."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from forge_trainer.hooks.base import Hook, RunView
from forge_trainer.progress import Progress
from forge_trainer.ranks import from_first
from forge_trainer.steps.base import StepOutput


class EvaluateTasks(Hook):
    """A hook that logs the scores of tasks under `eval/tasks/`. Collective.

    Args:
        every: steps between evaluations.
        run: the run.
        tasks: returns numbers by name; all ranks call it, and the result of the first rank counts.
        weights: a context inside which the parameters hold the weights to evaluate.
        on_results: called with the results.
    """

    span = "evaluate"

    def __init__(
        self,
        every: int,
        run: RunView,
        tasks: Callable[[], dict[str, float]],
        weights: Callable[[], AbstractContextManager[None]],
        on_results: Callable[[Progress, Mapping[str, float]], None] = lambda progress, results: None,
    ) -> None:
        self.every = every
        self._run, self._tasks, self._weights, self._on_results = run, tasks, weights, on_results

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """See `Hook.on_step`. Collective."""
        with self._weights():
            numbers = self._tasks()
        found = {f"eval/tasks/{name}": value for name, value in numbers.items()}
        found = from_first(lambda: found, self._run.mesh.control_group)
        self._run.log(found)
        self._on_results(progress, found)
