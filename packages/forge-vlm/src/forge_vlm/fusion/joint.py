"""The joint decoder: visual tokens replace tokens. B batch, T tokens, V visual tokens, D width."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn


class Merge(nn.Module):
    """Writes features at the places of an index; its role under tensor parallelism is `merge`."""

    def forward(self, x: Tensor, features: Tensor, index: Tensor) -> Tensor:
        """Replace [B, T, D] by row index - 1 of [V, D] wherever index [B, T] is not 0."""
        return torch.where(index[..., None] > 0, features[(index - 1).clamp(min=0)].to(x.dtype), x)


class Joint(nn.Module):
    """Replaces embeddings at image places by visual tokens."""

    tensor_roles: ClassVar[dict[str, str]] = {"merge": "merge"}

    def __init__(self) -> None:
        super().__init__()
        self.merge = Merge()

    def forward(self, x: Tensor, features: Tensor, index: Tensor, counts: Tensor) -> dict[str, Tensor]:
        """Return the inputs of the decoder.

        Args:
            x: [B, T, D] embeddings.
            features: [V, D] visual tokens of all sequences in their order; at least one.
            index: [B, T] 0 for text, else 1 + the number of the visual token in its row.
            counts: [B] number of visual tokens of each row.
        """
        before = (counts.cumsum(0) - counts)[:, None]
        return {"hidden": self.merge(x, features, torch.where(index > 0, index + before, 0))}
