"""Softmax attention with soft-capped scores or sinks, which `F.scaled_dot_product_attention` cannot compute.

B batch, T queries, S keys, N query heads, K heads of keys and values, H head dim.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from forge_model.attention.mask import Attend, LastKeys, Mask, attend_flex, flex_blocks, suits_flex
from forge_model.error import ModelError


class ExplicitAttention:
    """Attention that computes all scores at once on the CPU, block by block with FlexAttention on CUDA."""

    def resolve(self, mask: Mask, window: int | None) -> Any:
        """Return `LastKeys`, a block mask of FlexAttention, or a bool mask [B or 1, 1, T, S]."""
        if mask.sees_last_keys(window):
            return LastKeys(window)
        return flex_blocks(mask, window) if suits_flex(mask) else mask.dense(window)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        resolved: Any,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `forge_model.attention.mask.Attend.__call__`."""
        if resolved is None:
            raise ModelError("explicit attention is given no mask; it takes what its own `resolve` makes")
        factor: float = query.shape[-1] ** -0.5 if scale is None else scale
        if isinstance(resolved, LastKeys):
            key, value = resolved.of(key, value)
        elif not isinstance(resolved, Tensor):
            return _flex(query, key, value, resolved, factor, softcap, sinks)
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = _by_group(query, key.transpose(-1, -2)).to(wide) * factor
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if isinstance(resolved, Tensor):
            scores = scores.masked_fill(~resolved, float("-inf"))
        if sinks is None:
            return _by_group(scores.softmax(-1).to(value.dtype), value)
        column = sinks.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        return _by_group(weights.to(value.dtype), value)


def _by_group(left: Tensor, right: Tensor) -> Tensor:
    """[B, N, T, X] @ [B, K, X, Y] -> [B, N, T, Y]: N / K heads share each of the K, without copies."""
    kv_heads, tokens = right.shape[1], left.shape[2]
    rows = left.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    return (rows @ right).unflatten(2, (-1, tokens)).flatten(1, 2)


class SinkAttention(ExplicitAttention):
    """Softmax attention with sinks and without a soft cap.

    Attributes:
        by_blocks: see `forge_model.attention.mask.SoftmaxAttention`; a sink is one more key of every query.
    """

    by_blocks: ClassVar[bool] = True


explicit_attention: Attend = ExplicitAttention()
"""The default `attend` of attention modules with a soft cap."""

sink_attention: Attend = SinkAttention()
"""The default `attend` of attention modules with sinks and without a soft cap."""


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Any,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Use FlexAttention. A sink gets exp(sink) / (exp(sink) + exp(lse)) of all weights of a query."""

    def capped(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)  # type: ignore[operator]

    change = None if softcap is None else capped
    if sinks is None:
        return attend_flex(query, key, value, blocks, scale, score_mod=change)
    from torch.nn.attention.flex_attention import AuxRequest

    wanted = AuxRequest(lse=True)
    out, aux = attend_flex(query, key, value, blocks, scale, score_mod=change, return_aux=wanted)
    kept = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])
    return out * kept[..., None].to(out.dtype)
