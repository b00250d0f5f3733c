"""Makes uncompiled code keep and compute like compiled code, as the compiler does not run in a plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from forge_parallel.activation_checkpointing import checkpoint_activations
from forge_parallel.config import ActivationCheckpointingConfig
from forge_parallel.match import find
from forge_parallel.plan import Plan
from torch import Tensor, nn

from forge_trainer.config.job import Job


def keep_as_compiled(model: nn.Module, config: ActivationCheckpointingConfig) -> list[str]:
    """Make blocks without recomputation save the same tensors as compiled blocks: matmul inputs and outputs.

    `selective` recomputation keeps the outputs, `MatmulInputs` the inputs. This matches the default of the
    compiler: three cases measured on GPUs (docs/plan.md) are within 4 %.

    Returns:
        The names of these blocks.
    """
    if config.mode not in ("none", "every"):
        return []
    patterns = Plan.of(model).flat().block_patterns
    named = [item for pattern in patterns for item in find(model, pattern).items()]
    kept = dict(item for i, item in enumerate(named) if config.mode == "none" or i % config.every)
    checkpoint_activations(kept.values(), ActivationCheckpointingConfig(mode="selective"))
    return list(kept)


class MatmulInputs:
    """Holds the inputs of matmuls in compiled blocks, from the forward pass to the end of the backward pass.

    Args:
        blocks: names of the blocks in places.
    """

    def __init__(self, blocks: Iterable[str]) -> None:
        self._inputs: dict[str, deque[list[Tensor]]] = {block: deque() for block in blocks}
        self._now = ""

    def entered(self, module: str) -> None:
        """Record the beginning of a block's forward pass, for one of the micro-batches in flight."""
        if module in self._inputs:
            self._inputs[module].append([])

    def took(self, module: str, tensor: Tensor) -> None:
        """Hold the input of a matmul inside a module."""
        queue = self._inputs.get(_block_of(module, self._inputs))
        if queue:
            queue[-1].append(tensor)

    def came_back(self, module: str) -> None:
        """Record that the backward pass reached a module; the backward pass of the previous block is over."""
        block = _block_of(module, self._inputs)
        if block != self._now:
            self.over()
            self._now = block

    def over(self) -> None:
        """Release the inputs of the present block, whose backward pass is over."""
        if queue := self._inputs.get(self._now):
            queue.popleft()
        self._now = ""


def _block_of(module: str, blocks: Iterable[str]) -> str:
    return next((one for one in blocks if module == one or module.startswith(f"{one}.")), "")


def loss_as_compiled(job: Job) -> Callable[..., Any]:
    """Build the loss of a job; as in compiled chunks, only the logits have the size of logits."""
    loss = job.loss.build()
    if hasattr(loss, "_treat"):
        loss._treat = _treated  # type: ignore[attr-defined]
    return loss


def _treated(logits: Tensor, wide: Tensor | None, target: Tensor, counts: Tensor, options: Any) -> Any:
    """See `forge_model.loss.cross_entropy._treat`: one pass over the logits."""
    logits.mul_(1.0)
    picked = counts.new_empty(counts.shape)
    hits = None if options.training else target == 0
    return counts.new_empty(counts.shape), picked, 0.0, hits
