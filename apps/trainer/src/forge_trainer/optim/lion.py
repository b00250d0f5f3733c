"""Lion (Chen et al. 2023, arXiv:2302.06675 algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from forge_config import Meta

from forge_trainer.optim.base import Decay, OptimizerConfig, optimizers

if TYPE_CHECKING:
    from forge_parallel.mesh import Mesh
    from torch.optim import Optimizer

    from forge_trainer.optim.local_parameters import LocalParameters
    from forge_trainer.optim.parameters import NamedParameter


@optimizers.register("lion")
class LionConfig(OptimizerConfig):
    """The sign of an average of gradients; one moment. Wants a third to a tenth of the rate of AdamW.

    Attributes:
        betas: of the average that is used, and of the one that is kept.
    """

    recorded_keys = ("betas",)

    lr: Annotated[float, Meta(gt=0)] = 1e-4
    betas: tuple[Decay, Decay] = (0.9, 0.99)

    def build(self, parameters: Sequence[NamedParameter], mesh: Mesh | None = None) -> Optimizer:
        """See `OptimizerConfig.build`."""
        from forge_trainer.optim.local_parameters import LocalOptimizer

        return LocalOptimizer(self.param_groups(parameters), {"Lion": self._step}, elementwise=["Lion"])

    def _step(self, held: LocalParameters, group: Mapping[str, Any]) -> None:
        from forge_trainer.optim.local_parameters import foreach

        lr, (beta1, beta2) = group["lr"], self.betas
        average = held.state("exp_avg")
        direction = foreach("lerp", average, held.grads, 1 - beta1)
        foreach("sign_", direction)
        values = held.update("mul", held.values, 1 - lr * group["weight_decay"])
        foreach("add_", values, direction, alpha=-lr)
        held.put("exp_avg", held.update("lerp", average, held.grads, 1 - beta2))
        held.put_values(values)
