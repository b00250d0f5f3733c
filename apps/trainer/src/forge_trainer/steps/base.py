"""What a step is: it trains on one global batch and evaluates, and returns device tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from forge_config import Config, Registry

if TYPE_CHECKING:
    from forge_data.loading.loader import MicroBatch
    from forge_parallel.mesh import Mesh
    from torch import Tensor, nn

    from forge_trainer.steps.update import Update

Batch: TypeAlias = "Sequence[MicroBatch]"
"""This rank's part of one global batch."""


@dataclass
class StepOutput:
    """What a step tells the hooks and guards. Tensors stay on the device until somebody logs them.

    Attributes:
        loss: [] nats a token over the global batch, without regularizers.
        grad_norm: [] float32, of the whole model before clipping.
        finite: [] bool; when false, the step changed nothing.
        lr: learning rate of the first parameter group.
        samples: sequences in the global batch.
        tokens: tokens in the global batch.
        metrics: further device scalars by name, means over the global batch.
        shapes: of the inputs of each micro-batch of this rank; empty where the step does not say.
    """

    loss: Tensor
    grad_norm: Tensor
    finite: Tensor
    lr: float
    samples: int
    tokens: int
    metrics: dict[str, Tensor] = field(default_factory=dict)
    shapes: Sequence[Mapping[str, Sequence[int]]] = ()


class Step(Protocol):
    """Trains and evaluates. Both methods are collective."""

    def train(self, batch: Batch, step: int) -> StepOutput:
        """Take optimizer step number `step` (from 0); without effect when loss or gradient are not finite."""
        ...

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Numbers by name over a finite pass, among them `loss` in nats a token.

        Every rank yields the same number of micro-batches. The model keeps the mode (train or eval) it is in.
        """
        ...


class StepConfig(Config):
    """Interface of `[step]`."""

    def build(
        self,
        parts: Sequence[nn.Module],
        loss_fn: Callable[..., Any],
        mesh: Mesh,
        *,
        seed: int = 0,
        update: Update | None = None,
    ) -> Step:
        """The step.

        Args:
            parts: the parts of the model that this rank holds; one, without a pipeline.
            loss_fn: from `[loss]`.
            mesh: the grid of ranks.
            seed: of the random numbers drawn while training.
            update: from gradients to new weights; None for a step that only evaluates.
        """
        raise NotImplementedError


steps = Registry("step", StepConfig, default="text")
