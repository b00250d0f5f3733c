"""What compiled code keeps and computes, done by uncompiled code, for the compiler does not run on paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forge_parallel.activation_checkpointing import checkpoint_activations
from forge_parallel.config import ActivationCheckpointingConfig
from forge_parallel.match import find
from forge_parallel.plan import Plan
from torch import Tensor, nn

from forge_trainer.config.job import Job


def keep_as_compiled(model: nn.Module, config: ActivationCheckpointingConfig) -> None:
    """Let blocks that are not recomputed keep what compiled ones do, or little more: `selective` does.

    What the compiler computes again it never holds all at once, as `selective` does with one block: the peak
    is up to 2 GiB too high.
    """
    if config.mode not in ("none", "every"):
        return
    patterns = Plan.of(model).flat().block_patterns
    blocks = [block for pattern in patterns for block in find(model, pattern).values()]
    kept = [x for i, x in enumerate(blocks) if config.mode == "none" or i % config.every]
    checkpoint_activations(kept, ActivationCheckpointingConfig(mode="selective"))


def loss_as_compiled(job: Job) -> Callable[..., Any]:
    """The loss of a job, whose compiled chunks hold nothing of the size of logits but the logits."""
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
