"""Schedule-Free AdamW (Defazio et al. 2024, arXiv:2405.15682), as in the package schedulefree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from forge_config import Meta

from forge_trainer.optim.base import Decay, OptimizerConfig, optimizers

if TYPE_CHECKING:
    from forge_parallel.mesh import Mesh
    from torch import Tensor
    from torch.optim import Optimizer

    from forge_trainer.optim.elementwise import Formula
    from forge_trainer.optim.local_parameters import LocalParameters
    from forge_trainer.optim.parameters import NamedParameter


@optimizers.register("schedule-free-adamw")
class ScheduleFreeAdamWConfig(OptimizerConfig):
    """Averages the weights instead of decaying the learning rate; needs a constant schedule with warm-up.

    The model trains at `y`, between the fast weights `z` and their average `x`. Evaluation, `forge eval`,
    `generate` and `export` use `x`; a checkpoint holds `y` and `z`.

    Attributes:
        betas: weight of `x` in `y`, and decay rate of the second moment.
        eps: constant added to the root of the second moment.
        weight_power: power of the largest learning rate so far in the weight of a step in the average.
        step_power: power of the number of the step in the same weight.
        compile: whether to compile the step of large parameters to one pass; needs a C++ compiler, on a GPU
            Triton.
    """

    needs_constant_lr: ClassVar[bool] = True

    free_keys = ("compile",)
    recorded_keys = ("eps", "weight_power", "step_power")

    lr: Annotated[float, Meta(gt=0)] = 1e-3
    betas: tuple[Annotated[float, Meta(gt=0, lt=1)], Decay] = (0.9, 0.95)
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    weight_power: Annotated[float, Meta(ge=0)] = 2.0
    step_power: Annotated[float, Meta(ge=0)] = 0.0
    compile: bool = False

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

        formula = partial(_schedule_free, betas=self.betas, eps=self.eps)
        return LocalOptimizer(
            self.param_groups(parameters),
            {"ScheduleFreeAdamW": partial(self._step, formula)},
            ["ScheduleFreeAdamW"],
            compiled=self.compile,
        )

    def _step(self, formula: Formula, local_params: LocalParameters, group: Mapping[str, Any]) -> None:
        import torch

        lr, (beta1, beta2) = group["lr"], self.betas
        largest = local_params.scalars("lr_max").clamp(min=lr)
        weight = local_params.steps.double() ** self.step_power * largest**self.weight_power
        total = local_params.scalars("weight_sum") + weight
        share = torch.where(total > 0, weight / total, 0.0)
        numbers = 1 - beta2 ** local_params.steps.double(), share, lr * (beta1 * (1 - share) - 1)
        local_params.put("lr_max", largest.unbind())
        local_params.put("weight_sum", total.unbind())
        states = {"exp_avg_sq": False, "z": True}
        local_params.apply(formula, states, lr, group["weight_decay"], *map(local_params.each, numbers))

    def evaluated(self, value: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """See `OptimizerConfig.evaluated`."""
        return value.lerp(state["z"].to(value.dtype), 1 - 1 / self.betas[0])


def _schedule_free(
    update: Any,
    values: list[Tensor],
    grads: list[Tensor],
    second: list[Tensor],
    fast: list[Tensor],
    lr: float | Tensor,
    weight_decay: float | Tensor,
    correction: list[Tensor],
    share: list[Tensor],
    ahead: list[Tensor],
    betas: tuple[float, float],
    eps: float,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """See `Formula`."""
    from forge_trainer.optim.elementwise import foreach

    second = update("mul", second, betas[1])
    foreach("addcmul_", second, grads, grads, 1 - betas[1])
    roots = foreach("div", second, correction)
    foreach("sqrt_", roots)
    foreach("add_", roots, eps)
    direction = foreach("div", grads, roots)
    foreach("add_", direction, foreach("mul", values, weight_decay))
    apart = foreach("sub", fast, values)
    foreach("mul_", apart, share)
    values = update("add", values, apart)
    fast = update("sub", fast, foreach("mul", direction, lr))
    foreach("mul_", direction, ahead)
    foreach("add_", values, direction)
    return values, second, fast
