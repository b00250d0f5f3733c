"""Lion (Chen et al. 2023, arXiv:2302.06675 algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from forge_config import Meta

from forge_trainer.optim.base import Decay, OptimizerConfig, optimizers

if TYPE_CHECKING:
    from forge_parallel.mesh import Mesh
    from torch import Tensor
    from torch.optim import Optimizer

    from forge_trainer.optim.local_parameters import LocalParameters
    from forge_trainer.optim.parameters import NamedParameter


@optimizers.register("lion")
class LionConfig(OptimizerConfig):
    """Updates by the sign of an average of gradients; one moment. Needs 1/3 to 1/10 of AdamW's learning rate.

    Attributes:
        betas: decay rates of the average in the update, and of the stored average.
        compile: whether to compile the step of large parameters to one pass; needs a C++ compiler, on a GPU
            Triton.
    """

    free_keys = ("compile",)
    recorded_keys = ("betas",)

    lr: Annotated[float, Meta(gt=0)] = 1e-4
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    compile: bool = False

    def build(self, parameters: Sequence[NamedParameter], mesh: Mesh | None = None) -> Optimizer:
        """See `OptimizerConfig.build`."""
        from forge_trainer.optim.local_parameters import LocalOptimizer

        formula = partial(_lion, betas=self.betas)

        def step(local_params: LocalParameters, group: Mapping[str, Any]) -> None:
            local_params.apply(formula, {"exp_avg": False}, group["lr"], group["weight_decay"])

        groups = self.param_groups(parameters)
        return LocalOptimizer(groups, {"Lion": step}, elementwise=["Lion"], compiled=self.compile)


def _lion(
    update: Any,
    values: list[Tensor],
    grads: list[Tensor],
    average: list[Tensor],
    lr: float | Tensor,
    weight_decay: float | Tensor,
    betas: tuple[float, float],
) -> tuple[list[Tensor], list[Tensor]]:
    """See `Formula`."""
    from forge_trainer.optim.elementwise import add_scaled, foreach

    direction = foreach("lerp", average, grads, 1 - betas[0])
    foreach("sign_", direction)
    values = update("mul", values, 1 - lr * weight_decay)
    add_scaled(values, direction, -lr)
    return values, update("lerp", average, grads, 1 - betas[1])
