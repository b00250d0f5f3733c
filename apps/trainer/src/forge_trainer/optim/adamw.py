"""AdamW with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from forge_config import Meta

from forge_trainer.optim.base import OptimizerConfig, optimizers

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

Decay = Annotated[float, Meta(ge=0, lt=1)]


@optimizers.register("adamw")
class AdamWConfig(OptimizerConfig):
    """torch's fused AdamW; matrices decay, vectors (norm gains, biases) do not.

    Attributes:
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: per step, times the learning rate.
    """

    recorded_keys = ("betas", "eps", "weight_decay")

    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    weight_decay: Annotated[float, Meta(ge=0)] = 0.1

    def build(self, named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        """See `OptimizerConfig.build`."""
        import torch

        trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        groups = [
            {
                "params": [entry for entry in trainable if (entry[1].ndim >= 2) == decays],
                "weight_decay": self.weight_decay if decays else 0.0,
                "initial_lr": self.lr,
            }
            for decays in (True, False)
        ]
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)
