"""Which activations are recomputed in the backward pass, or moved to the host, instead of kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn

from forge_parallel import capabilities
from forge_parallel.config import ActivationCheckpointingConfig
from forge_parallel.host_reads import repeatable
from forge_parallel.offload import offload


def checkpoint_activations(
    blocks: Iterable[nn.Module],
    config: ActivationCheckpointingConfig,
    reading: Iterable[nn.Module] = (),
) -> None:
    """Apply the section `[activation_checkpointing]` to blocks, in place.

    Names of parameters do not change, unlike with torch's wrapper module.

    Args:
        blocks: the blocks of the model.
        config: the section.
        reading: layers inside blocks for which the host reads numbers, by `numbers_of`. It reads them once,
            although these layers are computed twice.
    """
    if config.mode == "budget":
        import torch._functorch.config as functorch

        functorch.activation_memory_budget = config.budget
        # from 2.15 on process groups are inputs of a graph, and the compiler asks how large its inputs are
        if hasattr(functorch, "unsafe_treat_script_objects_as_zero_size"):
            functorch.unsafe_treat_script_objects_as_zero_size = True
    if config.mode in ("none", "budget"):
        return
    if config.mode == "offload":
        offload(blocks)
        return
    every = config.every if config.mode == "every" else 1
    read = set(reading)
    for index, block in enumerate(blocks):
        if index % every == 0:
            reads = not read.isdisjoint(block.modules())
            block.forward = _checkpointed(block.forward, config.mode == "selective", reads)


def _checkpointed(forward: Callable[..., Any], selective: bool, reads: bool) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint

    contexts = {"context_fn": capabilities.selective_contexts(_policy)} if selective else {}

    # A function of its own, not a partial: the compiler needs a frame to look into.
    def run(*args: Any, **kwargs: Any) -> Any:
        once = repeatable(forward) if reads else forward
        return checkpoint(once, *args, use_reentrant=False, **contexts, **kwargs)

    return run


def _policy(_: Any, op: Any, *__: Any, **___: Any) -> Any:
    """Save outputs that are expensive to compute or communicate."""
    from torch.utils.checkpoint import CheckpointPolicy

    return CheckpointPolicy.MUST_SAVE if op in _dear() else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _dear() -> set[Any]:
    aten, collectives = torch.ops.aten, torch.ops._c10d_functional
    attention = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    return {
        *(getattr(aten, name).default for name in ("mm", "addmm", "bmm", "_scaled_mm", "_grouped_mm")),
        *(getattr(aten, f"_scaled_dot_product_{name}").default for name in attention),
        *(getattr(collectives, name).default for name in ("all_reduce", "all_to_all_single")),
        *(getattr(collectives, name).default for name in ("all_gather_into_tensor", "reduce_scatter_tensor")),
        torch.ops.higher_order.flex_attention,
    }
