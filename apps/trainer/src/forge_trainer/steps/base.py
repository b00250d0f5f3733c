"""The interface of a step: it trains on one global batch or evaluates, and returns device tensors."""

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
    """The result of a step for hooks and guards. Tensors stay on the device until somebody logs them.

    Attributes:
        loss: [] nats a token over the global batch, without regularizers.
        grad_norm: [] float32 gradient norm of the whole model before clipping.
        finite: [] bool; when false, the step changed nothing.
        lr: learning rate of the first parameter group.
        samples: sequences in the global batch.
        tokens: tokens in the global batch.
        metrics: further device scalars by name, means over the global batch.
        shapes: shapes of the inputs of each micro-batch of this rank; empty if the step does not give them.
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
    """A step, which trains and evaluates. Both methods are collective."""

    def train(self, batch: Batch, step: int) -> StepOutput:
        """Take optimizer step number `step` (from 0); without effect when loss or gradient are not finite."""
        ...

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Evaluate a finite pass; return numbers by name, among them `loss` in nats a token.

        Every rank yields the same number of micro-batches. The model keeps the mode (train or eval) it is in.
        """
        ...


class StepConfig(Config):
    """The interface of the section `[step]`."""

    def build(
        self,
        parts: Sequence[nn.Module],
        loss_fn: Callable[..., Any],
        mesh: Mesh,
        *,
        seed: int = 0,
        update: Update | None = None,
    ) -> Step:
        """Build the step.

        Args:
            parts: this rank's parts of the model; without a pipeline, a single one.
            loss_fn: the loss of `[loss]`.
            mesh: the grid of ranks.
            seed: seed of the random numbers drawn while training.
            update: computes new weights from gradients; None for a step that only evaluates.
        """
        raise NotImplementedError


steps = Registry("step", StepConfig, default="text")
