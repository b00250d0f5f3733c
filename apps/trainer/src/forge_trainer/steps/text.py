"""Next-token training and evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from forge_data.loader import MicroBatch
from forge_model.loss import LossTerms, Sum
from forge_parallel.mesh import Mesh
from forge_parallel.runner import Inputs, build_runner
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

    parts: Sequence[nn.Module]
    loss_fn: Callable[..., Any]
    mesh: Mesh
    seed: int = 0
    update: Update | None = None

    def __post_init__(self) -> None:
        self._runner = build_runner(self.parts, self.mesh)
        self._names: dict[bool, dict[str, torch.dtype]] = {}  # of training, and of evaluation
        self._statistics: dict[str, torch.dtype] | None = None

    def train(self, batch: Batch, step: int) -> StepOutput:
        """See `Step.train`."""
        assert self.update is not None, "this step was built to evaluate only"
        seed_step(self.seed, step, self.mesh.batch.rank, self.mesh.device)
        samples = sum(len(micro.inputs["tokens"]) for micro in batch) * self.mesh.batch.size
        tokens = sum(micro.inputs["tokens"].numel() for micro in batch) * self.mesh.batch.size
        held = self.update.begin(tokens)
        means = self._backward(batch)
        loss = means.pop("loss")
        norm, finite, lr, statistics = self.update(step, loss, held)
        metrics = means | self._of_all_stages(statistics)
        return StepOutput(loss, norm, finite, lr, samples, tokens, metrics)

    def _backward(self, batch: Batch) -> dict[str, Tensor]:
        """Accumulate gradients; returns means over the global batch."""
        targets = torch.stack([micro.statistics["targets"] for micro in batch]).sum().float()
        # A blocking copy would wait for the step before.
        targets = self.mesh.batch.sum_(targets.to(self.mesh.device, non_blocking=True)).clamp(min=1)
        sums = Sums()

        def finish(terms: LossTerms) -> Tensor:
            sums.add(terms.sums)
            return terms.total / targets

        self._runner.backward([self._inputs(micro) for micro in batch], finish)
        totals = self._totals(sums, training=True)
        return {name: value / count.clamp(min=1) for name, (value, count) in totals.items()}

    def _totals(self, sums: Sums, training: bool) -> dict[str, Sum]:
        if training not in self._names:
            self._names[training] = sums.names(self.mesh)
        return sums.totals(self.mesh, self._names[training])

    def _of_all_stages(self, statistics: dict[str, Tensor]) -> dict[str, Tensor]:
        """What every stage of the pipeline tells. Collective."""
        if self.mesh.pipeline.size == 1:
            return statistics
        sums = Sums()
        sums.add({name: Sum(value, torch.ones_like(value)) for name, value in statistics.items()})
        if self._statistics is None:
            self._statistics = sums.names(self.mesh)
        totals = sums.totals(self.mesh, self._statistics)
        return {name: value / count for name, (value, count) in totals.items()}

    def _inputs(self, micro: MicroBatch) -> Inputs:
        return micro.to(self.mesh.device).inputs | {"loss_fn": self.loss_fn}

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """See `Step.evaluate`; adds `perplexity`. NaN when no target is valid."""
        sums = Sums(torch.float64)
        with evaluating(*self.parts):
            for micro in (micro for batch in batches for micro in batch):
                terms = self._runner.forward(self._inputs(micro))
                sums.add(terms.sums if terms is not None else {})
        value, count = self._totals(sums, training=False)["loss"]
        loss = (value / count).item()
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
