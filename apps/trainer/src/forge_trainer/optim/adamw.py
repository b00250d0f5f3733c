"""AdamW with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from forge_config import Meta

from forge_trainer.optim.base import OptimizerConfig, optimizers

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from forge_trainer.optim.parameters import NamedParameter

NO_DECAY = ("norm", "bias")
"""Roles whose parameters are not pulled to zero."""

Decay = Annotated[float, Meta(ge=0, lt=1)]


@optimizers.register("adamw")
class AdamWConfig(OptimizerConfig):
    """torch's fused AdamW; matrices and embeddings decay, norm gains and biases do not.

    Attributes:
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: per step, times the learning rate.
    """

    recorded_keys = ("betas", "eps", "weight_decay")

    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    weight_decay: Annotated[float, Meta(ge=0)] = 0.1

    def build(self, parameters: Sequence[NamedParameter]) -> Optimizer:
        """See `OptimizerConfig.build`."""
        import torch

        groups = [
            {
                "params": [(p.name, p.parameter) for p in parameters if (p.role not in NO_DECAY) == decays],
                "weight_decay": self.weight_decay if decays else 0.0,
                "initial_lr": self.lr,
            }
            for decays in (True, False)
        ]
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)
