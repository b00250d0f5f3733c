"""Next-token training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from forge_config import ConfigError
from forge_data.loading.loader import MicroBatch
from forge_model.loss.cross_entropy import LossTerms, Sum
from forge_parallel.mesh import Mesh
from forge_parallel.runner import Inputs, build_runner
from torch import Tensor, nn

from forge_trainer.randomness import seed_step
from forge_trainer.steps.answers import means, right
from forge_trainer.steps.base import Batch, StepOutput
from forge_trainer.steps.evaluation import Lengths, evaluated, evaluating
from forge_trainer.steps.sums import Sums
from forge_trainer.steps.update import Update

BY_SOURCE = "loss/"
"""The prefix of the names of losses of single sources."""


@dataclass
class TextStep:
    """Next-token training with gradient accumulation.

    The gradients are of the sum of all losses divided by the count of valid targets in the global batch, so
    they do not depend on how the batch is cut into ranks and micro-batches.

    Attributes:
        runner: runs the parts; also used by hooks that measure the model.
        answers: whether evaluations report `accuracy` and `answers`; see `forge_trainer.steps.answers`.
    """

    parts: Sequence[nn.Module]
    loss_fn: Callable[..., Any]
    mesh: Mesh
    seed: int = 0
    update: Update | None = None
    answers: bool = False

    def __post_init__(self) -> None:
        self.runner = build_runner(self.parts, self.mesh)
        self._names: dict[str, torch.dtype] | None = None  # of the sums of training
        self._statistics: dict[str, torch.dtype] | None = None

    def train(self, batch: Batch, step: int) -> StepOutput:
        """See `Step.train`."""
        assert self.update is not None, "this step was built to evaluate only"
        seed_step(self.seed, step, self.mesh.batch.rank, self.mesh.device)
        samples = sum(len(micro.inputs["tokens"]) for micro in batch) * self.mesh.batch.size
        tokens = sum(micro.inputs["tokens"].numel() for micro in batch) * self.mesh.batch.size
        targets, real = self._counts(batch)
        saved_buffers = self.update.begin(tokens if real is None else real, step)
        means = self._backward(batch, targets)
        loss = means.pop("loss")
        norm, finite, lr, statistics = self.update(step, loss, saved_buffers)
        metrics = means | self._of_all_stages(statistics)
        shapes = [{name: tuple(x.shape) for name, x in micro.inputs.items()} for micro in batch]
        return StepOutput(loss, norm, finite, lr, samples, tokens, metrics, shapes)

    def _counts(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Count targets of the global batch, and tokens without padding (None if unknown). Collective."""
        counts = [torch.stack([micro.statistics["targets"] for micro in batch]).sum()]
        if "doc_ids" in batch[0].inputs:
            counts.append(torch.stack([(micro.inputs["doc_ids"] >= 0).sum() for micro in batch]).sum())
        # A blocking copy would wait for the step before.
        moved = torch.stack(counts).to(self.mesh.device, non_blocking=True)
        targets, *real = self.mesh.batch.sum_(moved).unbind()
        return targets.clamp(min=1).float(), real[0].clamp(min=1) if real else None

    def _backward(self, batch: Batch, targets: Tensor) -> dict[str, Tensor]:
        """Accumulate gradients, divided by `targets`; return means over the global batch."""
        sums, moved = Sums(), [micro.to(self.mesh.device) for micro in batch]
        following = iter(moved)

        def finish(terms: LossTerms) -> Tensor:
            sums.add(terms.sums | by_source(terms, next(following)))
            return terms.total / targets

        self._accumulate([self._inputs(micro) for micro in moved], finish)
        if self._names is None:
            self._names = sums.names(self.mesh)
        totals = sums.totals(self.mesh, self._names)
        return {name: mean(name, total) for name, total in totals.items()}

    def _accumulate(self, micro_batches: Sequence[Inputs], finish: Callable[[Any], Tensor]) -> None:
        """Add up the gradients of all micro-batches. Collective."""
        self.runner.backward(micro_batches, finish)

    def _of_all_stages(self, statistics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the statistics of all pipeline stages. Collective."""
        if self.mesh.pipeline.size == 1:
            return statistics
        sums = Sums()
        sums.add({name: Sum(value, torch.ones_like(value)) for name, value in statistics.items()})
        if self._statistics is None:
            self._statistics = sums.names(self.mesh)
        totals = sums.totals(self.mesh, self._statistics)
        return {name: value / count for name, (value, count) in totals.items()}

    def _inputs(self, micro: MicroBatch) -> Inputs:
        return micro.inputs | {"loss_fn": self.loss_fn}

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """See `Step.evaluate`; adds `perplexity`, `bits_per_byte`, and each by source as `<name>/<source>`.

        Sources without targets are left out; bits a byte are left out if the bytes of tokens are unknown. The
        loss is NaN if no target is valid.
        """
        sums, lengths = Sums(torch.float64), Lengths()
        with evaluating(*self.parts):
            for micro in (micro for batch in batches for micro in batch):
                lengths.add(micro)
                moved = micro.to(self.mesh.device)
                terms = self.runner.forward(self._inputs(moved))
                if terms is not None:
                    hits = right(_hits(terms), moved) if self.answers else {}
                    sums.add(terms.sums | by_source(terms, moved) | hits)
        totals = sums.totals(self.mesh, sums.names(self.mesh))
        losses = {n: t for n, t in totals.items() if n == "loss" or n.startswith(BY_SOURCE)}
        return evaluated(losses, lengths.totals(self.mesh)) | means(totals)


def _hits(terms: LossTerms) -> Tensor:
    if terms.hits is None:
        raise ConfigError("step.answers is set, and the loss does not tell which targets were the likeliest")
    return terms.hits


def by_source(terms: LossTerms, micro: MicroBatch) -> dict[str, Sum]:
    """Return the loss of each source as `loss/<name>`, on the device; empty for a single source.

    Args:
        terms: loss terms of the micro-batch.
        micro: micro-batch on the device of the loss.
    """
    if terms.rows is None or len(micro.sources) < 2:
        return {}
    source = torch.arange(len(micro.sources), device=terms.total.device)
    mine = micro.statistics["source"] == source[:, None]
    values, counts = (torch.where(mine, part, 0).sum(1) for part in terms.rows)
    named = zip(micro.sources, values, counts, strict=True)
    return {f"{BY_SOURCE}{name}": Sum(value, count) for name, value, count in named}


def mean(name: str, total: Sum) -> Tensor:
    """Return the mean; over no target it is NaN for a loss, so that the step has no effect, else 0."""
    is_loss = name == "loss" or name.startswith(BY_SOURCE)
    return total.value / (total.count if is_loss else total.count.clamp(min=1))
