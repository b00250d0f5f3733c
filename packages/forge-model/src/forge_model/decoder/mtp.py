"""Modules that predict tokens after the next one. B batch, T tokens, D model dim.

Source: DeepSeek-V3, arXiv:2412.19437 section 2.2; where the paper leaves it open, as `MtpModel` of
`transformers` 5.23: hidden states are normalized before they are passed on, and embeddings come first in a
projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_model.decoder.context import Context
from forge_model.layers import Linear
from forge_model.loss.cross_entropy import LossTerms, Sum
from forge_model.norm_config import NormConfig


class MTPModule(nn.Module):
    """One depth: a projection, a block, a norm. Embedding and head are those of the model.

    Attributes:
        project: projection of a token's embedding and the hidden state of the previous depth (M_k, eq. 21).
        block: a block like that of the last layer (TRM_k, eq. 22).
        norm: norm of the output, which the head and the next depth get.
    """

    tensor_roles: ClassVar[dict[str, str]] = {
        "project": "tokenwise",
        "embed_norm": "norm",
        "hidden_norm": "norm",
        "norm": "norm",
    }

    def __init__(self, block: nn.Module, norm: NormConfig, dim: int) -> None:
        super().__init__()
        self.embed_norm = norm.build(dim)
        self.hidden_norm = norm.build(dim)
        self.project = Linear(2 * dim, dim, bias=False)
        self.block = block
        self.norm = norm.build(dim)

    def forward(self, embedded: Tensor, hidden: Tensor, context: Context) -> Tensor:
        """[B, T, D] of tokens k places further on and [B, T, D] of the previous depth -> [B, T, D]."""
        both = torch.cat([self.embed_norm(embedded), self.hidden_norm(hidden)], -1)
        return self.norm(self.block(self.project(both), context))


def ahead(x: Tensor, by: int, fill: int) -> Tensor:
    """Shift [B, T] to the left by `by` places, with `fill` at the end of each row."""
    by = min(by, x.shape[1])
    return F.pad(x[:, by:], (0, by), value=fill)


def look_ahead(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add later tokens and labels to the inputs of a `Decoder`, as a hook before its forward pass.

    Adds `ahead_tokens` [B, K, T] and, if there are labels, `ahead_labels` [B, K, T]. Context parallelism
    shards them afterwards like all inputs. Parts of a model always pass on the vectors of these tokens.
    """
    labels, depths = kwargs.get("labels"), range(1, model.config.mtp.num_modules + 1)  # type: ignore[union-attr]
    if labels is None and model.embed is not None and model.head is not None:
        return args, kwargs
    tokens, doc_ids = args[0] if args else kwargs["tokens"], kwargs.get("doc_ids")
    added = {"ahead_tokens": torch.stack([ahead(tokens, depth, 0) for depth in depths], 1)}
    if labels is not None:
        added["ahead_labels"] = torch.stack([labels_ahead(labels, doc_ids, depth) for depth in depths], 1)
    return args, kwargs | added


def labels_ahead(labels: Tensor, doc_ids: Tensor | None, depth: int) -> Tensor:
    """[B, T] -> [B, T]: targets `depth` places further on, ignored if the document has ended before."""
    moved = ahead(labels, depth, -100)
    return moved if doc_ids is None else moved.where(ahead(doc_ids, depth, -1) == doc_ids, -100)


def combined(terms: Sequence[LossTerms], weight: float) -> LossTerms:
    """Return the loss of the next token plus `weight` times the mean loss of all depths (eq. 24 and 25).

    All losses are sums that are later divided by the same count: the number of targets of the next token.
    """
    main, *depths = terms
    total = main.total + weight / len(depths) * torch.stack([one.total for one in depths]).sum()
    sums: dict[str, Sum] = {f"mtp{k}_loss": one.sums["loss"] for k, one in enumerate(depths, 1)}
    return LossTerms(total, main.sums | sums, main.rows, main.hits)
