"""What does a call of FlexAttention compute, as a call of `F.scaled_dot_product_attention`?

Letters: B sequences, N query heads, T queries, S keys.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from forge_interp.errors import InterpError

FLEX = "torch.nn.attention.flex_attention"


class _Unseen:
    """Placeholder for the log-sum-exp of scores, which a model would need to change weights."""

    def __getattr__(self, name: str) -> Any:
        raise InterpError(
            "the model goes on with the log-sum-exp of FlexAttention, as with sinks, so that its weights are "
            "not those of softmax(scores); expected none: run it on a CPU, where our own decoder makes all "
            "scores, or capture the projections of the module"
        )


def is_flex(function: Any, args: Sequence[Any]) -> bool:
    """Whether a function is FlexAttention without a score_mod.

    Two names of torch are private; without them FlexAttention is not recognized.
    """
    module = sys.modules.get(FLEX)
    flex, plain = (getattr(module, name, module) for name in ("flex_attention_hop", "_identity"))
    return module is not None and function is flex and args[3] is plain


def as_sdpa(
    flex: Callable[..., Any], args: Sequence[Any]
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...], dict[str, Any]]:
    """Return a function with the arguments of `F.scaled_dot_product_attention`, and these arguments.

    The function calls FlexAttention. The mask, [B or 1, N or 1, T, S] bool, is mask_mod at every place.
    """
    create_mask = sys.modules[FLEX].create_mask
    query, key, value, _, blocks, scale, *_ = args
    rows, heads = blocks[2].shape[:2]  # how many blocks of keys there are, [B or 1, N or 1, blocks]
    mask = create_mask(blocks[-1], rows, heads, query.shape[2], key.shape[2], device=query.device)
    some, every = (
        _listed(*pair, blocks[-3:-1], mask) for pair in ((blocks[2], blocks[3]), (blocks[4], blocks[5]))
    )
    if bool((mask & ~(some | every)).any()) or bool((every & ~mask).any()):
        raise InterpError(
            "the blocks of the block mask hide or show other keys than its mask_mod: FlexAttention gives one "
            "output compiled and another one here; expected a mask_mod that says the same (create_block_mask)"
        )

    def attention(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        return flex(query, key, value, *args[3:])[0]

    return attention, (query, key, value), {"attn_mask": mask, "scale": scale, "enable_gqa": True}


def _listed(counts: Tensor | None, indices: Any, sizes: Sequence[int], mask: Tensor) -> Tensor:
    """Mark the places of a mask [B, N, T, S] in blocks that are among the first `counts` of `indices`."""
    if counts is None:
        return torch.zeros_like(mask)
    queries, keys = (
        torch.arange(n, device=mask.device) // by for n, by in zip(mask.shape[2:], sizes, strict=True)
    )
    listed = torch.arange(indices.shape[-1], device=mask.device) < counts[..., None]
    blocks = listed.new_zeros(*indices.shape[:3], max(int(keys.max()) + 1, int(indices.max()) + 1)).int()
    return (blocks.scatter_add(-1, indices.long(), listed.int()) > 0)[:, :, queries][..., keys]


def flex_result(found: Any) -> Any:
    """Complete an attention output to the tuple of FlexAttention; FlexAttention's own result stays."""
    return (found, _Unseen(), _Unseen()) if isinstance(found, Tensor) else found
