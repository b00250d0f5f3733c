"""What depends on the device, chosen as on a GPU, where tensors are fake ones of a CPU.

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
"""StageFormats of FLOPs that no operation of torch stands for, by kind."""


class Linked(torch.autograd.Function):
    """Attention over a block mask as one kernel: what FlexAttention and flash kernels keep and make."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, share: float, note: Noted | None
    ) -> Tensor:
        """Keep all three, the result, and a number a query."""
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        norms = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, norms)
        ctx.note, ctx.flops = note, share * attention_flops(query, key, value)
        if note is not None:
            note("attention", ctx.flops)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Make a gradient of each: five products, where the forward pass has two."""
        if ctx.note is not None:
            ctx.note("attention", 2.5 * ctx.flops)
        return *(torch.empty_like(x) for x in ctx.saved_tensors[:3]), None, None


def attention_flops(query: Tensor, key: Tensor, value: Tensor) -> float:
    """Of a forward pass over all pairs of tokens: query [B, N, T, H], key and value [B, K, S, .]."""
    batch, heads, queries, width = query.shape
    return 2.0 * batch * heads * queries * key.shape[2] * (width + value.shape[-1])


def attention_by(note: Noted | None) -> Callable[..., Tensor]:
    """A stand-in for attention kernels, which differ by device."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
        mask = options.get("attn_mask", rest[0] if rest else None)
        causal = options.get("is_causal", False) or (mask is not None and not isinstance(mask, Tensor))
        return Linked.apply(query, key, value, 0.5 if causal else 1.0, note)

    return attention


def summed(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """`forge_model.moe.routing._summed` as it is where there is a GPU."""
    each = rows.index_select(0, places.flatten()).unflatten(0, places.shape)
    return each.sum(1) if weights is None else torch.bmm(weights.unsqueeze(1), each).squeeze(1)


def one_pass(formula: Any, finite: Any, wide: Any, tensors: Sequence[Tensor], numbers: Any) -> None:
    """`step_compiled`, as far as memory sees it: each tensor is read and written once."""
    for tensor in tensors:
        tensor.mul_(1)


@contextmanager
def as_on_a_gpu(note: Noted | None = None) -> Iterator[None]:
    """What depends on the device is chosen as on a GPU, where tensors of the CPU are fake ones.

    Args:
        note: told of the FLOPs of attention.
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
    """What is read of a tensor on a CPU, and cannot be of one without values: whether a step is finite."""
    with (
        patch.object(local_parameters.LocalOptimizer, "finite", lambda self: None),
        patch.object(local_parameters, "step_compiled", one_pass),
    ):
        yield


def use_kernels_of_a_gpu(model: nn.Module) -> None:
    """Let experts compute as they do on a GPU, in place."""
    for module in model.modules():
        if hasattr(module, "_fused"):
            module._fused = False  # type: ignore[assignment]
