"""Measures the gradient noise scale, which tells how large a batch is worth its cost, from half batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from forge_parallel.grads import global_norm
from forge_parallel.runner import Inputs
from torch import Tensor

from forge_trainer.steps.base import Batch, StepOutput
from forge_trainer.steps.text import TextStep

DECAY = 0.9
"""The decay of the averages of the two estimates, for each measured step."""


@dataclass
class NoiseScaleStep(TextStep):
    """Next-token training that measures the noise scale, in tokens, every few steps and then logs it.

    Let G_b be the gradient of the first half of the micro-batches, with b targets, and G_B that of all B.
    E|G_b|^2 = |G|^2 + tr(S)/b for the true gradient G and the covariance S of the gradient of one target, so
    |G|^2 and tr(S) follow from |G_b|^2 and |G_B|^2, without bias. The noise scale is the ratio of their
    averages, tr(S)/|G|^2: a batch much smaller than it wastes steps, a larger one wastes tokens. A measured
    step sums gradients over ranks twice. Steps that are not finite are not counted.

    Attributes:
        every: steps between measurements.

    Source: McCandlish et al. 2018, arXiv:1812.06162 appendix A.1.
    """

    every: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._measures = False
        self._found: tuple[Tensor, Tensor] | None = None  # squared norms of the gradients of half and of all
        # of tr(S), of |G|^2, and of 1
        self._averages = torch.zeros(3, dtype=torch.float64)
        self._began = False

    def train(self, batch: Batch, step: int) -> StepOutput:
        """See `Step.train`. Adds `noise_scale`, `noise_scale/trace` and `noise_scale/squared_gradient`."""
        self._measures = (step + 1) % self.every == 0
        out = super().train(batch, step)
        if self._measures:
            assert self._found is not None, "a micro-batch a rank has no halves; the job refuses it"
            self._count(batch, *self._found, out.finite)
        if self._began:
            trace, squared, weight = self._averages.unbind()
            out.metrics["noise_scale/trace"] = trace / weight
            out.metrics["noise_scale/squared_gradient"] = squared / weight
            out.metrics["noise_scale"] = trace / squared
        return out

    def _accumulate(self, micro_batches: Sequence[Inputs], finish: Callable[[Any], Tensor]) -> None:
        if not self._measures:
            return super()._accumulate(micro_batches, finish)
        half = len(micro_batches) // 2
        self.runner.backward(micro_batches[:half], finish)
        part = self._squared_norm()
        self.runner.backward(micro_batches[half:], finish)
        self._found = part, self._squared_norm()
        return None

    def _squared_norm(self) -> Tensor:
        assert self.update is not None
        parameters = [p for group in self.update.optimizer.param_groups for p in group["params"]]
        return global_norm(parameters, self.mesh).double().square()

    def _count(self, batch: Batch, part: Tensor, whole: Tensor, finite: Tensor) -> None:
        """Add the measurement of a step to the averages, on the device."""
        counts = torch.stack([micro.statistics["targets"] for micro in batch]).double()
        halves = torch.stack([counts[: len(batch) // 2].sum(), counts.sum()])
        few, all_ = self.mesh.batch.sum_(halves.to(self.mesh.device, non_blocking=True)).unbind()
        part = part * (all_ / few).square()  # gradients are those of sums over the count of all targets
        squared = (all_ * whole - few * part) / (all_ - few)
        trace = (part - whole) / (1 / few - 1 / all_)
        found = torch.stack([trace, squared, torch.ones_like(trace)])
        before = self._averages.to(found.device)
        usable = finite & torch.isfinite(found).all()
        self._averages = torch.where(usable, DECAY * before + (1 - DECAY) * found, before)
        self._began = True

    def state(self) -> dict[str, Any]:
        """State for the checkpoint. Waits for the device."""
        return {"averages": self._averages.tolist(), "began": self._began}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""
        self._averages = torch.tensor(state["averages"], dtype=torch.float64, device=self.mesh.device)
        self._began = state["began"]
