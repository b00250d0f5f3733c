"""The section `[model.ffn]`, and the FLOPs of a feed-forward. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from forge_config import Config, Meta, Registry
from msgspec.structs import replace

from forge_model.side_inputs import Needs

if TYPE_CHECKING:
    from torch import nn

Count = Annotated[int, Meta(ge=1)]


class FfnConfig(Config):
    """Interface of `[model.ffn]`.

    Attributes:
        dim: hidden width; absent means the default of the type.
        bias: biases on all projections.
        needs: side inputs that the module gets by keyword.
    """

    needs: ClassVar[Needs] = {}

    dim: Count | None = None
    bias: bool = False

    def build(self, dim: int) -> nn.Module:
        """Build a module ([..., D], side inputs by keyword) -> [..., D]."""
        raise NotImplementedError

    def hidden(self, dim: int) -> int:
        """Return the hidden width, with the default resolved."""
        raise NotImplementedError

    def resolved(self, dim: int) -> FfnConfig:
        """Return the same config with the default of the hidden width filled in."""
        return replace(self, dim=self.hidden(dim))

    def tensor_sizes(self, dim: int) -> dict[str, int]:
        """The sizes, by key, that tensor parallelism must divide."""
        return {"dim": self.hidden(dim)}

    def forward_flops(self, dim: int) -> float:
        """Matmul FLOPs a token of a forward pass."""
        raise NotImplementedError

    def expert_counts(self) -> dict[str, int]:
        """Return the number of experts of each layer of experts inside, by name; "" is the module itself."""
        return {}

    def require_learning(self) -> None:
        """Check that every part of the feed-forward can learn.

        Raises:
            ValueError: the result does not depend on one of its parts.
        """

    def require_cut_experts(self, dim: int, ranks: int) -> None:
        """Check that each of `ranks` ranks can have a part of the hidden width of every expert.

        Raises:
            ValueError: they cannot.
        """
        if self.expert_counts():
            raise ValueError(
                f"the experts of a {type(self).__name__} cannot be cut over ranks; set "
                'tensor_parallel.experts = "whole"'
            )

    def expert_groups(self) -> dict[str, int]:
        """Return for each layer of `expert_counts` the number of groups if a token chooses some, else 1."""
        return dict.fromkeys(self.expert_counts(), 1)


ffns = Registry("ffn", FfnConfig, default="swiglu")


@ffns.register("swiglu")
class SwiGLUConfig(FfnConfig):
    """Gated feed-forward with SiLU (arXiv:2002.05202); default width 8/3 dim, rounded up to 64."""

    activation: ClassVar[str] = "silu"

    def hidden(self, dim: int) -> int:
        """See `FfnConfig.hidden`."""
        return -(-8 * dim // 3 // 64) * 64 if self.dim is None else self.dim

    def build(self, dim: int) -> nn.Module:
        """See `FfnConfig.build`."""
        from forge_model.ffn.dense import GatedFfn

        return GatedFfn(dim, self.hidden(dim), self.activation, self.bias)

    def forward_flops(self, dim: int) -> float:
        """See `FfnConfig.forward_flops`."""
        return 6 * dim * self.hidden(dim)


@ffns.register("geglu")
class GeGLUConfig(SwiGLUConfig):
    """Gated feed-forward with GELU by its tanh formula, as in Gemma (arXiv:2002.05202); width as `swiglu`."""

    activation: ClassVar[str] = "gelu_tanh"


@ffns.register("mlp")
class MLPConfig(FfnConfig):
    """Plain feed-forward; default width 4 dim.

    Attributes:
        activation: the nonlinearity; `quick_gelu` is x sigmoid(1.702 x), as in CLIP.
    """

    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "silu"] = "gelu"

    def hidden(self, dim: int) -> int:
        """See `FfnConfig.hidden`."""
        return 4 * dim if self.dim is None else self.dim

    def build(self, dim: int) -> nn.Module:
        """See `FfnConfig.build`."""
        from forge_model.ffn.dense import MLP

        return MLP(dim, self.hidden(dim), self.activation, self.bias)

    def forward_flops(self, dim: int) -> float:
        """See `FfnConfig.forward_flops`."""
        return 4 * dim * self.hidden(dim)
