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
"""(hidden [B, T, D], head weight [V, D], labels [B, T]) -> terms of the loss. If the head has a part of the
vocabulary, its `VocabularyShard` comes last. `softcap` is passed by keyword if logits have a soft cap."""


class Head(nn.Module):
    """The head of a model; it also computes the loss, so that its weight is gathered once for both.

    Attributes:
        vocabulary: the rows of the weight that this process computes with; None means all.
        softcap: logits become softcap * tanh(logit / softcap); None leaves them as they are.
        divisor: divisor of the logits before that. Hidden states are divided, which gives any loss the same.
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
        """[B, T, D] -> [B, T, V], or the result of `loss_fn` if there are labels [B, T].

        With several `parts`, the rows are split evenly, and the result is a list with the loss of each part.
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
