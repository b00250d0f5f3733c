"""The head: from hidden states to logits, or to the loss. B batch, T tokens, D model dim, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forge_model.error import ModelError
from forge_model.loss.cross_entropy import LossTerms, VocabularyShard
from forge_model.roles import Role

LossFn = Callable[..., LossTerms]
"""(hidden [B, T, D], head weight [V, D], labels [B, T]) -> terms of the loss; where the head has a part
of the vocabulary, its `VocabularyShard` comes last. `softcap` is given by keyword where logits have one."""


class Head(nn.Module):
    """Logits, or the loss: made in here, so that a weight gathered for this module serves both.

    Attributes:
        vocabulary: which rows of the weight this process computes with; None means all.
        softcap: logits become softcap * tanh(logit / softcap); None leaves them as they are.
        divisor: what they are divided by first. Hidden states are, which is the same for every loss.
    """

    roles: ClassVar[dict[str, Role]] = {"weight": "head"}
    vocabulary: VocabularyShard | None = None

    def __init__(self, dim: int, vocab_size: int, softcap: float | None = None, divisor: float = 1.0) -> None:
        super().__init__()
        self.softcap, self.divisor = softcap, divisor
        self.weight: nn.Parameter = nn.Parameter(torch.empty(vocab_size, dim))

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, loss_fn: LossFn | None = None, parts: int = 1
    ) -> Any:
        """[B, T, D] -> [B, T, V], or what `loss_fn` returns when there are labels [B, T].

        With several `parts`, of which each has as many rows, a list of what it returns for each.
        """
        hidden = hidden if self.divisor == 1 else hidden / self.divisor
        if labels is None:
            logits = nn.functional.linear(hidden, self.weight)
            if self.softcap is not None:
                logits = self.softcap * torch.tanh(logits / self.softcap)
            return logits if self.vocabulary is None else self.vocabulary.gather(logits)
        if loss_fn is None:
            raise ModelError("labels were given without a loss_fn; pass LossConfig().build()")
        part = () if self.vocabulary is None else (self.vocabulary,)
        # a loss that knows no soft cap is not given one, and otherwise fails: it would be another loss
        options = {} if self.softcap is None else {"softcap": self.softcap}
        made = [
            loss_fn(h, self.weight, y, *part, **options)
            for h, y in zip(hidden.chunk(parts), labels.chunk(parts), strict=True)
        ]
        return made if parts > 1 else made[0]
