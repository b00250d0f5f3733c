"""Feed-forward layers. D model dim, F ffn dim."""

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from forge_model.layers import Linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


def clamped_unit(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """Return (u + 1) g sigmoid(alpha g): g is `gate`, at most `limit`; u is `up`, clamped to +-`limit`.

    Source: GPT-OSS, arXiv:2508.10925; as `GptOssExperts` of `transformers`.
    """
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * (alpha * gate).sigmoid()


class GatedFfn(nn.Module):
    """w_down(activation(w_gate x) * w_up x). Source: Shazeer 2020, arXiv:2002.05202 eq. 6."""

    residual_writers: ClassVar[tuple[str, ...]] = ("w_down.weight",)
    tensor_roles: ClassVar[dict[str, str]] = {
        "": "gather",
        "w_gate": "colwise",
        "w_up": "colwise",
        "w_down": "rowwise",
    }

    def __init__(self, dim: int, hidden: int, activation: str, bias: bool) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.w_gate = Linear(dim, hidden, bias=bias)
        self.w_up = Linear(dim, hidden, bias=bias)
        self.w_down = Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.w_down(self.activation(self.w_gate(x)) * self.w_up(x))


class MLP(nn.Module):
    """w_down(activation(w_up x))."""

    residual_writers: ClassVar[tuple[str, ...]] = ("w_down.weight",)
    tensor_roles: ClassVar[dict[str, str]] = {"": "gather", "w_up": "colwise", "w_down": "rowwise"}

    def __init__(self, dim: int, hidden: int, activation: str, bias: bool) -> None:
        super().__init__()
        self.w_up = Linear(dim, hidden, bias=bias)
        self.w_down = Linear(hidden, dim, bias=bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.w_down(self.activation(self.w_up(x)))
