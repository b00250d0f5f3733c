"""Reads the device scalars of a step every N steps and hands them to the trackers."""

from collections.abc import Sequence

from forge_trainer.clock import Clock
from forge_trainer.hooks.base import Hook
from forge_trainer.progress import Progress
from forge_trainer.step import StepOutput
from forge_trainer.track import Tracker


class Log(Hook):
    """Writes loss, gradient norm, learning rate and speed. Runs on the first rank only."""

    def __init__(
        self, every: int, trackers: Sequence[Tracker], clock: Clock, flops_per_token: float, tokens: int
    ) -> None:
        self.every = every
        self._trackers = trackers
        self._clock = clock
        self._flops_per_token = flops_per_token
        self._tokens = tokens

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """See `Hook.on_step`. Waits for the device."""
        loss, norm = out.loss.item(), out.grad_norm.item()
        speed = (progress.tokens - self._tokens) / self._clock.lap()
        self._tokens = progress.tokens
        record = {
            "step": progress.step,
            "tokens": progress.tokens,
            "loss": loss,
            "grad_norm": norm,
            "lr": out.lr,
            "tokens_per_s": speed,
            "model_tflops": speed * self._flops_per_token / 1e12,
            "skipped": int(not out.finite.item()),
        }
        record |= {name: value.item() for name, value in out.metrics.items()}
        for tracker in self._trackers:
            tracker.log(record)
