"""The section `[model.norm]`. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from forge_config import Config, Meta, Registry

from forge_model.side_inputs import Needs

if TYPE_CHECKING:
    from torch import nn


class NormConfig(Config):
    """Interface of `[model.norm]`.

    Attributes:
        eps: added to the variance.
        needs: side inputs that the module gets by keyword.
    """

    needs: ClassVar[Needs] = {}

    eps: Annotated[float, Meta(gt=0)] = 1e-5

    def build(self, dim: int) -> nn.Module:
        """Build a module ([..., dim], side inputs by keyword) -> [..., dim]."""
        raise NotImplementedError


norms = Registry("norm", NormConfig, default="rmsnorm")


@norms.register("rmsnorm")
class RMSNormConfig(NormConfig):
    """Root mean square norm with a gain (Zhang & Sennrich 2019, arXiv:1910.07467).

    Attributes:
        zero_centered: the gain is 1 + weight, and the weight starts at 0 (as Gemma).
    """

    zero_centered: bool = False

    def build(self, dim: int) -> nn.Module:
        """See `NormConfig.build`."""
        from torch import nn

        if not self.zero_centered:
            return nn.RMSNorm(dim, eps=self.eps)
        from forge_model.layers import ZeroCenteredRMSNorm

        return ZeroCenteredRMSNorm(dim, eps=self.eps)


@norms.register("layernorm")
class LayerNormConfig(NormConfig):
    """Layer norm with gain and, if configured, bias (Ba et al. 2016, arXiv:1607.06450).

    Attributes:
        bias: add a learnt bias.
    """

    bias: bool = False

    def build(self, dim: int) -> nn.Module:
        """See `NormConfig.build`."""
        from torch import nn

        return nn.LayerNorm(dim, eps=self.eps, bias=self.bias)
