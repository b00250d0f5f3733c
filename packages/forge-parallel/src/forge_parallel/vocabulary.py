"""The roles of embeddings and heads of which each rank has a part of the vocabulary.

B batch, T tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard

from forge_parallel.collectives import all_gather
from forge_parallel.tensor_roles import Axis, RoleModule


class Embed(RoleModule):
    """An embedding of a part of the vocabulary; the part of the last rank may be shorter."""

    placements = {"weight": Shard(0)}
    uneven = True

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] -> the residual stream."""
        weight, entries = self.local("weight"), self._parameters["weight"].shape[0]  # type: ignore[union-attr]
        index = tokens - self.tensor_axis.first_of(entries)
        known = (index >= 0) & (index < len(weight))
        # elsewhere an id that nobody knows would be an embedding of zeros
        anywhere = (tokens >= 0) & (tokens < entries)
        torch._assert_async(anywhere.all(), "a token id is outside the vocabulary")  # pyright: ignore[reportPrivateImportUsage]
        return self.tensor_axis.leave(F.embedding(index.where(known, 0), weight) * known[..., None])


class Head(RoleModule):
    """A head that computes the logits of a part of the vocabulary.

    A module with an attribute `vocabulary` gets a `VocabularyShard`, and computes its loss from a part of the
    logits; for any other module the logits are gathered.
    """

    placements = {"weight": Shard(0), "bias": Shard(0)}
    uneven = True

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The residual stream -> logits [B, T, V], or the result of the module on them."""
        axis = self.tensor_axis
        out = super().forward(axis.enter(hidden), *args, **kwargs)  # type: ignore[misc]
        entries = self._parameters["weight"].shape[0]  # type: ignore[union-attr]
        return out if hasattr(self, "vocabulary") else gather_logits(out, axis.group, entries)


class VocabularyShard:
    """The part of the vocabulary that a head has, and the sums over the other parts. Collective.

    Args:
        axis: the ranks that have a part each.
        entries: V, of the full vocabulary.

    Attributes:
        first: the first id of this part.
    """

    def __init__(self, axis: Axis, entries: int) -> None:
        self.first = axis.first_of(entries)
        self._group, self._entries = axis.group, entries

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over the parts, in place."""
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """Maximum over the parts, in place."""
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return tensor

    def gather(self, logits: Tensor) -> Tensor:
        """[..., V of this part] -> [..., V]."""
        return gather_logits(logits, self._group, self._entries)


class _GatherLogits(torch.autograd.Function):
    """Gathers logits. All ranks use the result alike, so each keeps its own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, entries: int) -> Tensor:
        ctx.width, part = x.shape[-1], -(-entries // group.size())
        ctx.first = dist.get_rank(group) * part
        padded = F.pad(x, (0, part - ctx.width)) if part > ctx.width else x
        return all_gather(padded, x.ndim - 1, group).narrow(-1, 0, entries)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.narrow(-1, ctx.first, ctx.width), None, None


def gather_logits(logits: Tensor, group: dist.ProcessGroup, entries: int) -> Tensor:
    """[..., V of this part] -> [..., V = entries]. Collective."""
    return _GatherLogits.apply(logits, group, entries)
