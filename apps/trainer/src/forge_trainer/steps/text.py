"""Next-token training and evaluation of a model in one part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from forge_data.loader import MicroBatch
from forge_model.loss import LossTerms
from forge_parallel.apply import set_sync
from forge_parallel.mesh import Mesh
from torch import Tensor, nn

from forge_trainer.randomness import seed_step
from forge_trainer.steps.base import Batch, StepOutput
from forge_trainer.steps.evaluation import evaluating
from forge_trainer.steps.sums import Sums
from forge_trainer.steps.update import Update


@dataclass
class TextStep:
    """Next-token training with gradient accumulation.

    Gradients are those of the sum of all losses divided by the count of valid targets in the global batch, so
    they do not depend on how the batch is cut into ranks and micro-batches.
    """

    model: nn.Module
    loss_fn: Callable[..., Any]
    mesh: Mesh
    seed: int = 0
    update: Update | None = None

    def train(self, batch: Batch, step: int) -> StepOutput:
        """See `Step.train`."""
        assert self.update is not None, "this step was built to evaluate only"
        seed_step(self.seed, step, self.mesh.batch.rank, self.mesh.device)
        held = self.update.hold()
        means = self._backward(batch)
        loss = means.pop("loss")
        norm, finite, lr = self.update(step, loss, held)
        samples = sum(len(micro.inputs["tokens"]) for micro in batch) * self.mesh.batch.size
        tokens = sum(micro.inputs["tokens"].numel() for micro in batch) * self.mesh.batch.size
        return StepOutput(loss, norm, finite, lr, samples, tokens, means)

    def _backward(self, batch: Batch) -> dict[str, Tensor]:
        """Accumulate gradients; returns means over the global batch."""
        targets = torch.stack([micro.statistics["targets"] for micro in batch]).sum().float()
        # A blocking copy would wait for the step before.
        targets = self.mesh.batch.sum_(targets.to(self.mesh.device, non_blocking=True)).clamp(min=1)
        sums = Sums()
        for index, micro in enumerate(batch):
            set_sync(self.model, last=index == len(batch) - 1)
            terms = self._forward(micro)
            (terms.total / targets).backward()
            sums.add(terms.sums)
        totals = sums.totals(self.mesh.loss)
        return {name: value / count.clamp(min=1) for name, (value, count) in totals.items()}

    def _forward(self, micro: MicroBatch) -> LossTerms:
        return self.model(**micro.to(self.mesh.device).inputs, loss_fn=self.loss_fn)

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """See `Step.evaluate`; adds `perplexity`. NaN when no target is valid."""
        sums = Sums(torch.float64)
        with evaluating(self.model):
            for micro in (micro for batch in batches for micro in batch):
                sums.add(self._forward(micro).sums)
        value, count = sums.totals(self.mesh.loss)["loss"]
        loss = (value / count).item()
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
