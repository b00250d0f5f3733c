"""Connectors that map each feature to one token by itself. P features."""

from __future__ import annotations

from forge_model.ffn.dense import ACTIVATIONS
from forge_model.layers import Linear
from torch import Tensor, nn


class Projection(nn.Module):
    """A connector with one matrix."""

    def __init__(self, width: int, dim: int, bias: bool) -> None:
        super().__init__()
        self.project = Linear(width, dim, bias=bias)

    def forward(self, features: Tensor, grids: Tensor | None = None) -> Tensor:
        """[P, width] -> [P, dim]."""
        return self.project(features)


class MLP(nn.Module):
    """A connector with two matrices and a nonlinearity between them."""

    def __init__(self, width: int, hidden: int, dim: int, activation: str, bias: bool) -> None:
        super().__init__()
        self.up, self.down = Linear(width, hidden, bias=bias), Linear(hidden, dim, bias=bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, features: Tensor, grids: Tensor | None = None) -> Tensor:
        """[P, width] -> [P, dim]."""
        return self.down(self.activation(self.up(features)))
