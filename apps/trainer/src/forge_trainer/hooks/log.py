"""Reads the device scalars of a step every N steps and logs them to the trackers."""

from collections.abc import Callable, Collection

import torch
from forge_parallel.compile import cache_counts
from torch import Tensor

from forge_trainer.hooks.base import Hook, RunView
from forge_trainer.hooks.figures import Figures
from forge_trainer.hooks.memory import memory_figures
from forge_trainer.progress import Progress
from forge_trainer.steps.base import StepOutput
from forge_trainer.track.numbers import numbers


class Log(Hook):
    """A hook that logs loss, gradient norm, learning rate, figures, skipped steps and the time of each span.

    Args:
        every: steps between log entries.
        run: the run.
        skipped: returns the number of steps of the run that were not finite.
        tokens_read: returns the tokens of each source in a number of samples.
        goodput: returns the effective training time ratio of the run.
        frozen: see `Figures`.
    """

    span = "log"

    def __init__(
        self,
        every: int,
        run: RunView,
        skipped: Callable[[], int],
        frozen: Collection[str],
        tokens_read: Callable[[int], dict[str, int]] = lambda _: {},
        goodput: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.every = every
        self._run = run
        self._figures = Figures(run, frozen)
        self.rewind(run.progress)
        self._skipped, self._tokens_read, self._goodput = skipped, tokens_read, goodput
        self._skipped_before = 0

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """See `Hook.on_step`. Waits for the device."""
        loss, norm = out.loss.item(), out.grad_norm.item()
        lap = self._run.clock.lap()
        speed = (progress.tokens - self._tokens) / lap["training"]
        steps = progress.step - self._step
        self._step, self._tokens = progress.step, progress.tokens
        before, self._skipped_before = self._skipped_before, self._skipped()
        record = {
            "step": progress.step,
            "tokens": progress.tokens,
            "loss": loss,
            "grad_norm": norm,
            "lr": out.lr,
            **self._figures.of(speed, out.shapes),
            **memory_figures(self._run.mesh.device),
            **cache_counts(),
            "skipped": self._skipped_before - before,
            "goodput": self._goodput(),
        }
        record = _on_host(out.metrics) | record
        read = self._tokens_read(progress.samples)
        record |= {f"tokens/{name}": count for name, count in read.items() if len(read) > 1}
        record |= {f"time/{name}_s": seconds / steps for name, seconds in lap.items()}
        for tracker in self._run.trackers:
            tracker.log(record)

    def rewind(self, progress: Progress) -> None:
        """See `Hook.rewind`."""
        self._step, self._tokens = progress.step, progress.tokens

    def state(self) -> dict[str, int]:
        """Return the state for the checkpoint: the number of steps skipped up to the last log entry."""
        return {"skipped": self._skipped_before}

    def load_state(self, state: dict[str, int]) -> None:
        """Restore the result of `state`."""
        self._skipped_before = state["skipped"]


def _on_host(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Copy all scalars from the device at once; leave out values that are no numbers."""
    scalars = {
        name: value.detach().double()
        for name, value in metrics.items()
        if isinstance(value, Tensor) and not value.ndim and not value.is_complex()
    }
    others = numbers({name: value for name, value in metrics.items() if name not in scalars})
    if not scalars:
        return others
    values = torch.stack([value.to(next(iter(scalars.values())).device) for value in scalars.values()])
    return others | dict(zip(scalars, values.tolist(), strict=True))
