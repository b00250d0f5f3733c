"""Connectors that look at each patch alone. P patches."""

from __future__ import annotations

import torch.nn.functional as F
from forge_model.layers import Linear
from torch import Tensor, nn


class Projection(nn.Module):
    """One matrix with a bias."""

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.project = Linear(width, dim, bias=True)

    def forward(self, features: Tensor, grids: Tensor) -> Tensor:
        """[P, width] -> [P, dim]."""
        return self.project(features)


class MLP(nn.Module):
    """Two matrices with biases, a GELU between them."""

    def __init__(self, width: int, hidden: int, dim: int) -> None:
        super().__init__()
        self.up, self.down = Linear(width, hidden, bias=True), Linear(hidden, dim, bias=True)

    def forward(self, features: Tensor, grids: Tensor) -> Tensor:
        """[P, width] -> [P, dim]."""
        return self.down(F.gelu(self.up(features)))
