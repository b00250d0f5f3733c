"""Layers that draw no initial values; `forge_model.init.initialize` draws them.

torch draws them even on the meta device and loads its compiler for that, which takes seconds.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_model.init import Init
from forge_model.roles import Role


class Linear(nn.Linear):
    """`nn.Linear` with uninitialized parameters."""

    def reset_parameters(self) -> None:
        """Leave the parameters as they are."""


class Embedding(nn.Embedding):
    """`nn.Embedding` with an uninitialized weight."""

    def reset_parameters(self) -> None:
        """Leave the weight as it is."""


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """Root mean square norm whose gain is 1 + weight, as in Gemma (arXiv:2403.08295, code release)."""

    initial: ClassVar[dict[str, Init]] = {"weight": Init("constant", 0.0)}

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]; computed in float32, or float64 if `x` is."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, self.normalized_shape, 1 + self.weight.to(wide.dtype), self.eps).to(x.dtype)


class Sinks(nn.Module):
    """The score of each head for a key without a value (GPT-OSS, arXiv:2508.10925; arXiv:2309.17453)."""

    roles: ClassVar[dict[str, Role]] = {"weight": "bias"}

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads))

    def forward(self) -> Tensor:
        """Return the scores [N]."""
        return self.weight
