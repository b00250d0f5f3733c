"""Attention of queries over one block of keys: the kernels of torch, with the log-sum-exp of each query.

`joined` combines the results of several blocks (the online softmax of arXiv:2205.14135 section 3.1), and
`gradients` computes the gradient of one block from the result over all keys. B batch, T queries, S keys,
N heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_parallel.error import ParallelError

Gradients = tuple[Tensor, Tensor, Tensor]
aten = torch.ops.aten


class Block(NamedTuple):
    """Queries, and the keys and values that they attend to, with the same number of heads.

    Attributes:
        query: [B, N, T, H].
        key: [B, N, S, H].
        value: [B, N, S, H].
        visible: [B or 1, 1, T, S] bool; None if every query sees every key, or is causal.
        causal: whether query i sees key j only where j <= i; then S is T, and `visible` is None.
        scale: factor of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    visible: Tensor | None
    causal: bool
    scale: float

    @property
    def bias(self) -> Tensor | None:
        """The bias of the scores: 0, or -inf where a key is not visible."""
        if self.visible is None:
            return None
        zeros = torch.zeros(self.visible.shape, dtype=self.query.dtype, device=self.query.device)
        return zeros.masked_fill_(~self.visible, float("-inf"))


def attend(block: Block) -> tuple[Tensor, Tensor]:
    """Compute the attention of the queries over this block alone.

    Returns:
        [B, N, T, H], and [B, N, T] the log-sum-exp of the scores, at least in float32; 0 and -inf for a query
        that sees no key of the block.

    Raises:
        ParallelError: torch has no kernel for the block that returns the log-sum-exp.
    """
    out, lse = _kernels(block).forward(block)
    if block.visible is None:
        return out, lse
    sees = block.visible.any(-1)
    return out.masked_fill(~sees[..., None], 0), lse.masked_fill(~sees, float("-inf"))


def gradients(block: Block, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
    """Compute the gradients of queries, keys and values that pass through a block.

    Args:
        block: the block given to `attend`.
        out: [B, N, T, H], the result of the queries over the keys of all blocks.
        lse: [B, N, T], the log-sum-exp over the keys of all blocks.
        grad: the gradient of `out`.
    """
    return _kernels(block).backward(block, out.contiguous(), lse.contiguous(), grad.contiguous())


def joined(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the attention over two sets of keys into the attention over both; `lse` is finite."""
    total = torch.logaddexp(lse, more_lse)
    weights = ((one - total).exp().unsqueeze(-1) for one in (lse, more_lse))
    return sum(x * weight for x, weight in zip((out, more), weights, strict=True)), total  # type: ignore[return-value]


class _Kernels(NamedTuple):
    forward: Callable[[Block], tuple[Tensor, Tensor]]
    backward: Callable[[Block, Tensor, Tensor, Tensor], Gradients]


def _kernels(block: Block) -> _Kernels:
    """Return the kernels for the device, the number format and the mask of a block."""
    kind = block.query.device.type
    if kind == "cpu":
        return _Kernels(_cpu, _cpu_backward)
    if kind != "cuda":
        raise ParallelError(
            f'context_parallel.method = "ring" needs attention on a CPU or a CUDA GPU, not on {kind}; use '
            '"gather" or "ulysses"'
        )
    if block.visible is None and block.query.dtype in (torch.bfloat16, torch.float16):
        return _Kernels(_flash, _flash_backward)
    return _Kernels(_efficient, _efficient_backward)


def _cpu(block: Block) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(
        *block[:3], 0.0, block.causal, attn_mask=block.bias, scale=block.scale
    )


def _cpu_backward(block: Block, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *block[:3], out, lse, 0.0, block.causal, attn_mask=block.bias, scale=block.scale
    )


def _flash(block: Block) -> tuple[Tensor, Tensor]:
    width = block.query.shape[-1]
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        *_padded(block), 0.0, block.causal, scale=block.scale
    )
    return out[..., :width], lse


def _flash_backward(block: Block, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
    query, key, value = _padded(block)
    seed = torch.empty((), dtype=torch.int64, device=query.device)
    found = aten._scaled_dot_product_flash_attention_backward(
        _wide(grad), query, key, value, _wide(out), lse, None, None, query.shape[2], key.shape[2], 0.0,
        block.causal, seed, seed, scale=block.scale,
    )  # fmt: skip
    return tuple(one[..., : block.query.shape[-1]] for one in found[:3])  # type: ignore[return-value]


def _padded(block: Block) -> Gradients:
    """Pad the head dim to a multiple of 8, as the CUDA kernels need. Zeros change no score."""
    return tuple(_wide(one) for one in block[:3])  # type: ignore[return-value]


def _wide(x: Tensor) -> Tensor:
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if missing else x


def _efficient(block: Block) -> tuple[Tensor, Tensor]:
    """Call the memory-efficient kernel, which returns the log-sum-exp for a multiple of 32 queries."""
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        *_padded(block), _aligned(block), True, 0.0, block.causal, scale=block.scale
    )
    return out[..., : block.query.shape[-1]], lse[..., : block.query.shape[2]]


def _efficient_backward(block: Block, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
    query, key, value = _padded(block)
    seed = torch.empty((), dtype=torch.int64, device=query.device)
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
    found: Any = aten._scaled_dot_product_efficient_attention_backward(
        _wide(grad), query, key, value, _aligned(block), _wide(out), lse, seed, seed, 0.0,
        [True, True, True, False], block.causal, scale=block.scale,
    )  # fmt: skip
    return tuple(one[..., : block.query.shape[-1]] for one in found[:3])  # type: ignore[return-value]


def _aligned(block: Block) -> Tensor | None:
    """Return the bias [B, N, T, S] for all heads, with rows that begin at multiples of at least 16 bytes."""
    bias, (batch, heads) = block.bias, block.query.shape[:2]
    if bias is None:
        return None
    keys = bias.shape[-1]
    bias = F.pad(bias, (0, -keys % 16))[..., :keys]
    return bias.expand(batch, heads, -1, -1)
