"""Forward and backward of a model over micro-batches, whole or in the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from forge_parallel.apply import applied, set_sync
from forge_parallel.mesh import Mesh
from forge_parallel.plan import Plan
from forge_parallel.tensor_sums import TensorSums

Inputs = dict[str, Any]
"""The arguments of the model for one micro-batch."""


class Runner(Protocol):
    """Runs the parts of a model that this rank has. Both methods are collective."""

    def backward(self, micro_batches: Sequence[Inputs], finish: Callable[[Any], Tensor]) -> None:
        """Add up gradients over micro-batches, and sum them over ranks.

        Args:
            micro_batches: the same number on every rank; in a pipeline, of equal shapes, and what is no
                tensor is that of the first.
            finish: turns what the model returns for one of them into the [] that is differentiated; called
                in their order, where the end of the model is.
        """
        ...

    def forward(self, inputs: Inputs) -> Any:
        """What the model returns for a micro-batch; None on ranks without the end of the model."""
        ...


@dataclass
class WholeModel:
    """A model in one part."""

    model: nn.Module
    sums: TensorSums

    def backward(self, micro_batches: Sequence[Inputs], finish: Callable[[Any], Tensor]) -> None:
        """See `Runner.backward`."""
        with self.sums.summed_once():
            for index, inputs in enumerate(micro_batches):
                set_sync(self.model, last=index == len(micro_batches) - 1)
                finish(self.model(**inputs)).backward()

    def forward(self, inputs: Inputs) -> Any:
        """See `Runner.forward`."""
        return self.model(**inputs)


def build_runner(parts: Sequence[nn.Module], mesh: Mesh, plan: Plan | None = None) -> Runner:
    """What runs the parts of a model that this rank has, after `parallelize`.

    Args:
        parts: of `stages_of(...)`, in this order.
        mesh: the grid of ranks.
        plan: of the model; None for what it publishes.
    """
    if mesh.pipeline.size == 1:
        (model,) = parts
        return WholeModel(model, TensorSums(parts, mesh))
    from forge_parallel.pipeline import Pipeline

    return Pipeline(parts, mesh, plan or Plan.of(parts[0]), applied(parts[0]))
