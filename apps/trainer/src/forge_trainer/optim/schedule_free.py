"""Schedule-Free AdamW (Defazio et al. 2024, arXiv:2405.15682), as the package schedulefree has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from forge_config import Meta

from forge_trainer.optim.base import Decay, OptimizerConfig, optimizers

if TYPE_CHECKING:
    from forge_parallel.mesh import Mesh
    from torch import Tensor
    from torch.optim import Optimizer

    from forge_trainer.optim.local_parameters import LocalParameters
    from forge_trainer.optim.parameters import NamedParameter


@optimizers.register("schedule-free-adamw")
class ScheduleFreeAdamWConfig(OptimizerConfig):
    """Averages the weights instead of decaying the learning rate; give it a constant schedule with warm-up.

    The model trains at `y`, between the fast weights `z` and their average `x`. Evaluation, `forge eval`,
    `generate` and `export` use `x`; a checkpoint holds `y` and `z`.

    Attributes:
        betas: how far `y` is towards `x`, and the decay rate of the second moment.
        eps: added to the root of the second moment.
        weight_power: the average weighs steps by the largest learning rate so far to this power.
        step_power: and by their number to this power.
    """

    needs_constant_lr: ClassVar[bool] = True

    recorded_keys = ("eps", "weight_power", "step_power")

    lr: Annotated[float, Meta(gt=0)] = 1e-3
    betas: tuple[Annotated[float, Meta(gt=0, lt=1)], Decay] = (0.9, 0.95)
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    weight_power: Annotated[float, Meta(ge=0)] = 2.0
    step_power: Annotated[float, Meta(ge=0)] = 0.0

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.ema_decay:
            yield (
                f"ema_decay = {self.ema_decay} with schedule-free-adamw, which averages the weights itself; "
                "leave it out"
            )

    @property
    def averages(self) -> tuple[str, ...]:
        """See `OptimizerConfig.averages`."""
        return ("z",)

    def build(self, parameters: Sequence[NamedParameter], mesh: Mesh | None = None) -> Optimizer:
        """See `OptimizerConfig.build`."""
        from forge_trainer.optim.local_parameters import LocalOptimizer

        return LocalOptimizer(
            self.param_groups(parameters), {"ScheduleFreeAdamW": self._step}, ["ScheduleFreeAdamW"]
        )

    def _step(self, held: LocalParameters, group: Mapping[str, Any]) -> None:
        import torch

        from forge_trainer.optim.local_parameters import foreach

        lr, (beta1, beta2) = group["lr"], self.betas
        fast = held.state("z", start=held.values)
        second = held.update("mul", held.state("exp_avg_sq"), beta2)
        foreach("addcmul_", second, held.grads, held.grads, 1 - beta2)
        largest = held.scalars("lr_max").clamp(min=lr)
        weight = held.steps.double() ** self.step_power * largest**self.weight_power
        total = held.scalars("weight_sum") + weight
        share = torch.where(total > 0, weight / total, 0.0)

        roots = foreach("div", second, held.each(1 - beta2 ** held.steps.double()))
        foreach("sqrt_", roots)
        foreach("add_", roots, self.eps)
        direction = foreach("div", held.grads, roots)
        foreach("add_", direction, foreach("mul", held.values, group["weight_decay"]))
        apart = foreach("sub", fast, held.values)
        foreach("mul_", apart, held.each(share))
        values = held.update("add", held.values, apart)
        held.put("z", held.update("sub", fast, foreach("mul", direction, lr)))
        foreach("mul_", direction, held.each(lr * (beta1 * (1 - share) - 1)))
        foreach("add_", values, direction)
        held.put("exp_avg_sq", second)
        held.put("lr_max", largest.unbind())
        held.put("weight_sum", total.unbind())
        held.put_values(values)

    def evaluated(self, value: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """See `OptimizerConfig.evaluated`."""
        return value.lerp(state["z"].to(value.dtype), 1 - 1 / self.betas[0])
