"""One optimizer step: the part of a run that differs between kinds of models."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from forge_data.loader import MicroBatch
from forge_parallel.apply import set_sync
from forge_parallel.capabilities import without_dynamo
from forge_parallel.grads import clip_, global_norm
from forge_parallel.mesh import Mesh
from forge_resilience.finite import step_if_finite
from torch import Tensor, nn

from forge_trainer.progress import Progress
from forge_trainer.randomness import seed_step

Batch = list[MicroBatch]
"""This rank's part of one global batch."""


@dataclass
class StepOutput:
    """What a step tells the hooks and guards. Tensors stay on the device until somebody logs them.

    Attributes:
        loss: [] float32, nats a token over the global batch, without regularizers.
        grad_norm: [] float32, of the whole model before clipping.
        finite: [] bool; when false, the step changed nothing.
        lr: learning rate of the first parameter group.
        samples: sequences in the global batch.
        tokens: tokens in the global batch.
        metrics: further device scalars by name.
    """

    loss: Tensor
    grad_norm: Tensor
    finite: Tensor
    lr: float
    samples: int
    tokens: int
    metrics: dict[str, Tensor] = field(default_factory=dict)


class Step(Protocol):
    """Anything that trains on one batch. Collective."""

    def __call__(self, batch: Batch) -> StepOutput:
        """Take one optimizer step."""
        ...


@dataclass
class TextStep:
    """Next-token training with gradient accumulation.

    Gradients are those of the sum of all losses divided by the count of valid targets in the global batch, so
    they do not depend on how the batch is cut into ranks and micro-batches.
    """

    model: nn.Module
    loss_fn: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    lr_factor: Callable[[int], float]
    progress: Progress
    mesh: Mesh
    device: torch.device
    seed: int
    clip_norm: float

    def __call__(self, batch: Batch) -> StepOutput:
        """Take one step; without effect when loss or gradient of any rank are not finite. Collective."""
        seed_step(self.seed, self.progress.step, self.mesh.batch.rank, self.device)
        batch = [micro.to(self.device) for micro in batch]
        counts = torch.stack([micro.statistics["targets"] for micro in batch])
        valid = self.mesh.loss.sum_(counts.sum().float())
        means = self._backward(batch, valid.clamp(min=1))

        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = global_norm(parameters, self.mesh)
        finite = torch.isfinite(norm) & torch.isfinite(means["loss"])
        if self.clip_norm:
            clip_(parameters, self.clip_norm, norm)
        lr = self._set_lr()
        with without_dynamo():
            step_if_finite(self.optimizer, finite)
            self.optimizer.zero_grad()

        samples = sum(len(micro.inputs["tokens"]) for micro in batch) * self.mesh.batch.size
        tokens = sum(micro.inputs["tokens"].numel() for micro in batch) * self.mesh.batch.size
        return StepOutput(means.pop("loss"), norm, finite, lr, samples, tokens, means)

    def _backward(self, batch: Batch, valid: Tensor) -> dict[str, Tensor]:
        """Accumulate gradients; returns the mean of each term of the loss over the global batch."""
        sums: dict[str, Tensor] = {}
        for index, micro in enumerate(batch):
            set_sync(self.model, last=index == len(batch) - 1)
            terms = self.model(**micro.inputs, loss_fn=self.loss_fn)
            (terms.total / valid).backward()
            for name, one in terms.sums.items():
                sums[name] = sums.get(name, 0) + torch.stack([one.value, one.count])
        values, counts = self.mesh.loss.sum_(torch.stack(list(sums.values()))).unbind(1)
        return dict(zip(sums, values / counts.clamp(min=1), strict=True))

    def _set_lr(self) -> float:
        factor = self.lr_factor(self.progress.step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        return self.optimizer.param_groups[0]["lr"]
