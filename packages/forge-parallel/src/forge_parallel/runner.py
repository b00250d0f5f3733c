"""Forward and backward of a model over micro-batches, whole or in the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from forge_parallel.apply import applied, set_sync
from forge_parallel.mesh import Mesh
from forge_parallel.plan import Plan

Inputs = dict[str, Any]
"""The arguments of the model for one micro-batch."""


class Runner(Protocol):
    """Runs the parts of a model that this rank has. Both methods are collective."""

    def backward(self, micro_batches: Sequence[Inputs], finish: Callable[[Any], Tensor]) -> None:
        """Accumulate gradients over micro-batches, and sum them over ranks.

        Args:
            micro_batches: the same number on every rank; in a pipeline, of equal shapes, and arguments that
                are no tensors are taken from the first.
            finish: turns the output of the model for a micro-batch into the scalar [] to differentiate;
                called in the order of micro-batches, on ranks with the end of the model.
        """
        ...

    def forward(self, inputs: Inputs) -> Any:
        """Return the output of the model for a micro-batch; None on ranks without the end of the model."""
        ...


@dataclass
class WholeModel:
    """A model in one part.

    Attributes:
        model: the parallel model.
        around: a context for the passes of a step; see `sums_of`.
    """

    model: nn.Module
    around: Callable[[], AbstractContextManager[None]] = nullcontext

    def backward(self, micro_batches: Sequence[Inputs], finish: Callable[[Any], Tensor]) -> None:
        """See `Runner.backward`."""
        with self.around():
            for index, inputs in enumerate(micro_batches):
                set_sync(self.model, last=index == len(micro_batches) - 1)
                finish(self.model(**inputs)).backward()

    def forward(self, inputs: Inputs) -> Any:
        """See `Runner.forward`."""
        return self.model(**inputs)


def sums_of(parts: Sequence[nn.Module], mesh: Mesh) -> Callable[[], AbstractContextManager[None]]:
    """Return the context in which the passes of a step sum tp gradients once; see `TensorSums`."""
    if mesh.tp is None:
        return nullcontext
    from forge_parallel.tensor_sums import TensorSums

    return TensorSums(parts, mesh).summed_once


def build_runner(parts: Sequence[nn.Module], mesh: Mesh, plan: Plan | None = None) -> Runner:
    """Build the runner of this rank's parts, after `parallelize`.

    Args:
        parts: the stages of `stages_of(...)`, in this order.
        mesh: the grid of ranks.
        plan: the plan of the model; None for the plan that it publishes.
    """
    if mesh.pipeline.size == 1:
        (model,) = parts
        return WholeModel(model, sums_of(parts, mesh))
    from forge_parallel.pipeline import Pipeline

    return Pipeline(parts, mesh, plan or Plan.of(parts[0]), applied(parts[0]))
