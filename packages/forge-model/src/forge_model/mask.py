"""Which keys a query may see, worked out once a forward. B batch, T queries, S keys, N heads, H head dim."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """What attention sees: causal, plus any of documents, a sliding window, padding.

    Attributes:
        causal: plain causal attention over as many keys as queries; the two others are None then.
        visible: [B or 1, 1, T, S] bool, True where a query sees a key; for scaled dot-product attention.
        blocks: block mask for FlexAttention.
    """

    causal: bool = True
    visible: Tensor | None = None
    blocks: Any = None


def build_mask(
    tokens: int, device: torch.device, doc_ids: Tensor | None = None, window: int | None = None
) -> Mask:
    """The mask of a forward pass without cache; FlexAttention on CUDA, masked SDPA elsewhere.

    Args:
        tokens: T.
        device: where attention runs; decides the backend.
        doc_ids: [B, T] integer; tokens see only their own document.
        window: a token sees at most so many tokens, itself included.
    """
    if doc_ids is None and (window is None or window >= tokens):
        return Mask()
    if device.type == "cuda":
        return Mask(causal=False, blocks=flex_blocks(tokens, device, doc_ids, window))
    index = torch.arange(tokens, device=device)
    visible = sees(index[:, None], index[None, :], window)[None, None]
    if doc_ids is not None:
        visible = visible & (doc_ids[:, None, :, None] == doc_ids[:, None, None, :])
    return Mask(causal=False, visible=visible)


def sees(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Whether the token at `query` sees the one at `key`, by position alone."""
    visible = key <= query
    return visible if window is None else visible & (query - key < window)


def flex_blocks(tokens: int, device: torch.device, doc_ids: Tensor | None, window: int | None) -> Any:
    """The same mask for FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = sees(query, key, window)
        return position if doc_ids is None else position & (doc_ids[b, query] == doc_ids[b, key])

    batch = None if doc_ids is None else len(doc_ids)
    return create_block_mask(visible, batch, None, tokens, tokens, device=device.type)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    """Softmax attention with scale 1/sqrt(H).

    Args:
        query: [B, N, T, H].
        key: [B, K, S, H], K divides N.
        value: [B, K, S, H].
        mask: from `build_mask`.

    Returns:
        [B, N, T, H].
    """
    grouped = key.shape[1] != query.shape[1]
    if mask.blocks is not None:
        return _flex()(query, key, value, block_mask=mask.blocks, enable_gqa=grouped)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask.visible, is_causal=mask.causal, enable_gqa=grouped
    )


def _flex() -> Any:
    """FlexAttention, compiled unless a block around it already is: eager, it holds all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if torch.compiler.is_compiling() else _compiled_flex()


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
