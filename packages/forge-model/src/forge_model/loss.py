"""Next-token cross entropy that never holds all logits. n tokens, D model dim, V vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Sum(NamedTuple):
    """A sum and what it is divided by for its mean, [] float32 (float64 if the model is), on the device.

    Over several micro-batches or ranks both are summed first: the mean is sum of values / sum of counts.
    """

    value: Tensor
    count: Tensor


class LossTerms(NamedTuple):
    """What a model returns when it is given labels.

    Attributes:
        total: [] what is differentiated, a sum over the valid targets: cross entropy plus weighted z-loss.
        sums: what is reported, by name, not weighted. Always has `loss` (cross entropy in nats) and `z_loss`
            (the squared log-normalizers), both counted by valid targets. No gradient flows through them.
    """

    total: Tensor
    sums: dict[str, Sum]


class VocabularyShard(Protocol):
    """The part of the vocabulary that a head has, where others have the rest.

    Attributes:
        first: the first id of this part.
    """

    first: int

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over the parts, in place."""
        ...

    def max_(self, tensor: Tensor) -> Tensor:
        """Maximum over the parts, in place."""
        ...

    def gather(self, logits: Tensor) -> Tensor:
        """Logits of this part [..., V/parts] -> of the full vocabulary [..., V]."""
        ...


class Loss:
    """The loss of hidden states under a head.

    Args:
        chunk_tokens: logits are made for so many tokens at a time; 0 makes them all at once.
        z_loss_weight: weight of the squared log-normalizer.
    """

    def __init__(self, chunk_tokens: int = 1024, z_loss_weight: float = 0.0) -> None:
        self.chunk_tokens = chunk_tokens
        self.z_loss_weight = z_loss_weight

    def __call__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, vocabulary: VocabularyShard | None = None
    ) -> LossTerms:
        """Loss of each position against its label.

        Args:
            hidden: [..., D].
            weight: [V, D], or the rows of this part of the vocabulary.
            labels: [...] int64, already shifted; negative is ignored. None valid gives zero, with a graph.
            vocabulary: which part `weight` is; None means all. Collective over the parts otherwise: the loss
                is that of the full vocabulary, the gradient of `hidden` only what this part adds to it.
        """
        chunk = self.chunk_tokens or max(1, labels.numel())
        total, cross_entropy, z_loss, count = _LinearCrossEntropy.apply(
            hidden.flatten(0, -2),
            weight,
            labels.flatten(),
            chunk,
            self.z_loss_weight,
            torch.is_grad_enabled(),
            vocabulary,
        )
        return LossTerms(total, {"loss": Sum(cross_entropy, count), "z_loss": Sum(z_loss, count)})


class _LinearCrossEntropy(torch.autograd.Function):
    """Head and loss in one, a chunk of tokens at a time; gradients are made while the logits are at hand.

    The forward pass does the three matmuls that a head costs anyway, and holds one chunk of logits.

    Source of the idea: Hsu et al. 2024, arXiv:2410.10989 section 3.2.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        z_weight: float,
        training: bool,
        vocabulary: VocabularyShard | None,
    ) -> Any:
        wide = torch.promote_types(weight.dtype, torch.float32)
        need_hidden, need_weight = (needed and training for needed in ctx.needs_input_grad[:2])
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        sums = torch.zeros(3, dtype=wide, device=hidden.device)
        buffer = hidden.new_empty(min(chunk, len(labels)), len(weight))
        for start in range(0, len(labels), chunk):
            rows = slice(start, start + chunk)
            h, target = hidden[rows], labels[rows]
            valid = (target >= 0).to(wide)
            target = target.clamp(min=0)[:, None]
            logits = torch.mm(h, weight.t(), out=buffer[: len(target)]).to(wide)
            here: Tensor | float = 1.0
            if vocabulary is not None:
                target = target - vocabulary.first
                here = ((target >= 0) & (target < len(weight))).to(wide)
                target = target.clamp(0, len(weight) - 1)
            picked = (logits.gather(1, target) * here)[:, 0]
            # log-sum-exp in place: no second buffer of the size of the logits
            top = logits.amax(1, keepdim=True)
            if vocabulary is not None:
                top = vocabulary.max_(top)
            normalizer = logits.sub_(top).exp_().sum(1, keepdim=True)
            if vocabulary is not None:
                normalizer, picked = vocabulary.sum_(torch.stack([normalizer[:, 0], picked])).unbind()
                normalizer = normalizer[:, None]
            lse = (normalizer.log() + top)[:, 0]
            sums += torch.stack([((lse - picked) * valid).sum(), (lse.square() * valid).sum(), valid.sum()])
            if d_hidden is None and d_weight is None:
                continue
            # d(lse - picked + z lse^2)/d logits = softmax (1 + 2 z lse) - onehot
            d_logits = logits.mul_(((1 + 2 * z_weight * lse) * valid)[:, None] / normalizer)
            d_logits.scatter_add_(1, target, -valid[:, None] * here)
            d_logits = d_logits.to(h.dtype)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[rows])
            if d_weight is not None:
                _add_product(d_weight, d_logits.t(), h)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        cross_entropy, z_loss, count = sums.unbind()
        ctx.mark_non_differentiable(cross_entropy, z_loss, count)
        return cross_entropy + z_weight * z_loss, cross_entropy, z_loss, count

    @staticmethod
    def backward(ctx: Any, d_total: Tensor, *_: Tensor) -> Any:
        d_hidden, d_weight = ctx.saved_tensors
        if d_hidden is not None:
            d_hidden = (d_hidden * d_total).to(d_hidden.dtype)
        if d_weight is not None:
            # in place, unless another backward pass may come, as in pipelines without bubbles
            again = torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]
            d_weight = (d_weight * d_total if again else d_weight.mul_(d_total)).to(ctx.weight_dtype)
        return d_hidden, d_weight, None, None, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Total += a @ b, in the dtype of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
