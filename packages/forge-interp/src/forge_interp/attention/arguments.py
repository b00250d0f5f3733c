"""What is `F.scaled_dot_product_attention` given, and what may stand in its place?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def bind(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    """The signature of `F.scaled_dot_product_attention`."""
    return dict(locals())


def causal_bias(bias: Any, device: torch.device) -> tuple[bool, Tensor | None]:
    """`is_causal` and [T, S] bool for what it cannot express, of a `torch.nn.attention.bias.CausalBias`.

    To import its module would load the compiler; who has made one has done so.
    """
    if bias.variant.name == "UPPER_LEFT":
        return True, None
    shape = (bias.seq_len_q, bias.seq_len_kv)
    return False, torch.ones(shape, dtype=torch.bool, device=device).tril(shape[1] - shape[0])


def autocast_dtype(query: Tensor) -> torch.dtype:
    """Of the output that the call will have."""
    kind = query.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return query.dtype
    return query.dtype if query.dtype == torch.float64 else torch.get_autocast_dtype(kind)


def product_with_values(
    product: Callable[..., Tensor], weights: Tensor, values: Tensor, query: Tensor, *arguments: Any, **_: Any
) -> Tensor:
    """The model's product of its weights with other values: for attention in `AttentionCall.run`."""
    value = arguments[1]
    return product(weights, value.reshape(values.shape)).reshape(*query.shape[:3], -1)
