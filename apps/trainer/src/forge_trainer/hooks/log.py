"""Reads the device scalars of a step every N steps and hands them to the trackers."""

from forge_trainer.hooks.base import Hook, RunView
from forge_trainer.progress import Progress
from forge_trainer.steps.base import StepOutput


class Log(Hook):
    """Writes loss, gradient norm, learning rate, speed, and where the time of a step went."""

    span = "log"

    def __init__(self, every: int, run: RunView, flops_per_token: float) -> None:
        self.every = every
        self._run = run
        self._flops_per_token = flops_per_token
        self._step, self._tokens = run.progress.step, run.progress.tokens

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """See `Hook.on_step`. Waits for the device."""
        loss, norm = out.loss.item(), out.grad_norm.item()
        lap = self._run.clock.lap()
        speed = (progress.tokens - self._tokens) / lap["training"]
        steps = progress.step - self._step
        self._step, self._tokens = progress.step, progress.tokens
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
        record |= {f"time/{name}_s": seconds / steps for name, seconds in lap.items()}
        for tracker in self._run.trackers:
            tracker.log(record)
