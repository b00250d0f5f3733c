"""AdamW with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forge_config import Meta

from forge_trainer.optim.base import Decay, OptimizerConfig, optimizers

if TYPE_CHECKING:
    from forge_parallel.mesh import Mesh
    from torch.optim import Optimizer

    from forge_trainer.optim.local_parameters import LocalParameters
    from forge_trainer.optim.parameters import NamedParameter
    from forge_trainer.optim.rounding import StochasticRounding


@optimizers.register("adamw")
class AdamWConfig(OptimizerConfig):
    """torch's fused AdamW, or our own step for bfloat16 moments, stochastic rounding and weights in views.

    Attributes:
        betas: decay rates of the two moments.
        eps: constant added to the root of the second moment.
        moments: number format of the stored moments; bfloat16 halves their memory. It cannot represent the
            small changes of a moment whose decay rate is above 0.99, so this combination is refused.
        rounding: rounding of weights stored in bfloat16 (`precision.pure_bf16`): `stochastic` preserves, on
            average, updates that are too small for bfloat16.
    """

    recorded_keys = ("betas", "eps", "rounding")

    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    moments: Literal["float32", "bfloat16"] = "float32"
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.moments == "bfloat16" and max(self.betas) > 0.99:
            yield (
                f'betas = {list(self.betas)} with moments = "bfloat16": of a moment that changes by less '
                "than 1 % a step, bfloat16 would round changes away; use decay rates up to 0.99, or float32"
            )

    def build(self, parameters: Sequence[NamedParameter], mesh: Mesh | None = None) -> Optimizer:
        """See `OptimizerConfig.build`."""
        import torch
        from forge_parallel.tensor import local_part

        groups = self.param_groups(parameters)
        # torch's optimizer would give the elements of a view the steps of their neighbours in memory
        in_order = all(local_part(one.parameter).is_contiguous() for one in parameters)
        if self.moments == "float32" and self.rounding == "nearest" and in_order:
            return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)
        from forge_trainer.optim.local_parameters import LocalOptimizer
        from forge_trainer.optim.rounding import StochasticRounding

        rounding = StochasticRounding() if self.rounding == "stochastic" else None
        return LocalOptimizer(groups, {"AdamW": partial(self._step, rounding=rounding)}, ["AdamW"])

    def _step(
        self,
        local_params: LocalParameters,
        group: Mapping[str, Any],
        rounding: StochasticRounding | None = None,
    ) -> None:
        import torch

        from forge_trainer.optim.adam_rule import adamw_step

        moments = torch.bfloat16 if self.moments == "bfloat16" else None
        rounded = None if rounding is None else rounding.of(local_params, group)
        adamw_step(local_params, group, self.betas, self.eps, moments, rounded)
