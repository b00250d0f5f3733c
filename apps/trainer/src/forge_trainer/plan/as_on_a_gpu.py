"""Makes code that depends on the device run as on a GPU, with fake tensors of a CPU.

B batch, T queries, S keys, N heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from forge_model.attention import mask as masks
from forge_model.moe import routing
from forge_parallel import fp8 as eight_bits
from torch import Tensor, nn

from forge_trainer.optim import local_parameters

Noted = Callable[[str, float], None]
"""A function that counts FLOPs that no operation of torch reports; takes their kind and number."""


class Linked(torch.autograd.Function):
    """Attention over a block mask as one kernel; it keeps what FlexAttention and flash kernels keep."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, share: float, note: Noted | None
    ) -> Tensor:
        """Save query, key, value, the result, and one number for each query."""
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        norms = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, norms)
        ctx.note, ctx.flops = note, share * attention_flops(query, key, value)
        if note is not None:
            note("attention", ctx.flops)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return a gradient of each input: five products, where the forward pass has two."""
        if ctx.note is not None:
            ctx.note("attention", 2.5 * ctx.flops)
        return *(torch.empty_like(x) for x in ctx.saved_tensors[:3]), None, None


def attention_flops(query: Tensor, key: Tensor, value: Tensor) -> float:
    """Return the FLOPs of a forward pass over all pairs: query [B, N, T, H], key and value [B, K, S, .]."""
    batch, heads, queries, width = query.shape
    return 2.0 * batch * heads * queries * key.shape[2] * (width + value.shape[-1])


def attention_by(note: Noted | None) -> Callable[..., Tensor]:
    """Return a replacement for attention kernels, which differ by device."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
        mask = options.get("attn_mask", rest[0] if rest else None)
        causal = options.get("is_causal", False) or (mask is not None and not isinstance(mask, Tensor))
        return Linked.apply(query, key, value, 0.5 if causal else 1.0, note)

    return attention


def summed(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute `forge_model.moe.routing._summed` as on a GPU."""
    each = rows.index_select(0, places.flatten()).unflatten(0, places.shape)
    return each.sum(1) if weights is None else torch.bmm(weights.unsqueeze(1), each).squeeze(1)


def one_pass(formula: Any, finite: Any, wide: Any, tensors: Sequence[Tensor], numbers: Any) -> None:
    """Access memory like `step_compiled`: read and write each tensor once."""
    for tensor in tensors:
        tensor.mul_(1)


@contextmanager
def as_on_a_gpu(note: Noted | None = None) -> Iterator[None]:
    """Make code that depends on the device run as on a GPU, inside this context, with fake CPU tensors.

    Args:
        note: called with the FLOPs of attention.
    """
    attention = attention_by(note)
    with ExitStack() as stack:
        changes = [
            (F, "scaled_dot_product_attention", attention),
            (masks, "attend_flex", attention),
            (masks, "suits_flex", lambda mask: mask.padding is None),
            (local_parameters, "window_elements", lambda device: local_parameters.WINDOW_ELEMENTS),
            (local_parameters.LocalOptimizer, "finite", lambda self: self.found_inf == 0),
            (local_parameters, "step_compiled", one_pass),
            (routing, "_summed", summed),
            (eight_bits, "_require_device", lambda *_: None),
        ]
        for place, name, change in changes:
            stack.enter_context(patch.object(place, name, change))
        yield


@contextmanager
def as_on_a_cpu() -> Iterator[None]:
    """Replace code that reads values of CPU tensors (whether a step is finite), as fake tensors have none."""
    with (
        patch.object(local_parameters.LocalOptimizer, "finite", lambda self: None),
        patch.object(local_parameters, "step_compiled", one_pass),
    ):
        yield


def use_kernels_of_a_gpu(model: nn.Module) -> None:
    """Make experts compute as on a GPU, in place."""
    for module in model.modules():
        if hasattr(module, "_fused"):
            module._fused = False  # type: ignore[assignment]
