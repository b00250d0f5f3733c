"""AdamW with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from forge_config import Meta

from forge_trainer.optim.base import Decay, OptimizerConfig, optimizers

if TYPE_CHECKING:
    from forge_parallel.mesh import Mesh
    from torch.optim import Optimizer

    from forge_trainer.optim.parameters import NamedParameter


@optimizers.register("adamw")
class AdamWConfig(OptimizerConfig):
    """torch's fused AdamW.

    Attributes:
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
    """

    recorded_keys = ("betas", "eps")

    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: Annotated[float, Meta(gt=0)] = 1e-8

    def build(self, parameters: Sequence[NamedParameter], mesh: Mesh | None = None) -> Optimizer:
        """See `OptimizerConfig.build`."""
        import torch

        return torch.optim.AdamW(
            self.param_groups(parameters), lr=self.lr, betas=self.betas, eps=self.eps, fused=True
        )
