"""Muon (Jordan 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982) beside AdamW."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forge_config import Meta

from forge_trainer.optim.base import Decay, OptimizerConfig, optimizers
from forge_trainer.optim.groups import Role

if TYPE_CHECKING:
    from forge_parallel.mesh import Mesh
    from torch.optim import Optimizer

    from forge_trainer.optim.local_parameters import LocalParameters
    from forge_trainer.optim.parameters import NamedParameter

Scale = Literal["original", "match-rms-adamw", "spectral"]
"""Factor of the orthogonal update of a matrix, A rows (outputs) and B columns (inputs): sqrt(max(1, A/B));
0.2 sqrt(max(A, B)), which suits learning rates and decays of AdamW; sqrt(A/B)."""


@optimizers.register("muon")
class MuonConfig(OptimizerConfig):
    """Orthogonal updates for matrices, AdamW for everything else.

    Momentum is sharded like the parameters. One rank computes each whole matrix, and the work is balanced
    over ranks; two collectives for each bucket of matrices gather and scatter them. A matrix without a
    gradient, on one rank or on all, gets a gradient of zeros: it decays.

    Attributes:
        scale: factor of the update of A x B matrices: `original` is sqrt(max(1, A/B)), `match-rms-adamw`
            0.2 sqrt(max(A, B)), `spectral` sqrt(A/B). It has no default, as the learning rate depends on it.
        roles: roles of the parameters with orthogonal updates; stacked matrices (experts) are separate.
        momentum: decay of the average of gradients.
        nesterov: whether to look ahead by one step of momentum.
        ns_steps: number of Newton-Schulz iterations.
        compute: number format of matrices in transfer and computation; `auto` is bfloat16 on GPUs and
            float32 on CPUs.
        adamw_lr: learning rate of all other parameters; default `lr`.
        betas: decay rates of the moments of AdamW.
        eps: constant added to the root of the second moment of AdamW.
    """

    recorded_keys = ("momentum", "nesterov", "ns_steps", "adamw_lr", "betas", "eps")

    scale: Scale
    roles: tuple[Role, ...] = ("matrix", "expert", "router")
    momentum: Decay = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Meta(ge=1, le=50)] = 5
    compute: Literal["auto", "bfloat16", "float32"] = "auto"
    adamw_lr: Annotated[float, Meta(gt=0)] | None = None
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: Annotated[float, Meta(gt=0)] = 1e-8

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if not {*self.roles} - {"norm", "bias"}:
            yield (
                f"roles = {list(self.roles)} are none of matrices, and muon would be AdamW; name one of "
                "matrix, expert, router, embedding, head, or use adamw"
            )

    def kind(self, parameter: NamedParameter) -> str:
        """See `OptimizerConfig.kind`."""
        return "Muon" if parameter.role in self.roles and parameter.parameter.ndim >= 2 else "AdamW"

    def options(self, kind: str) -> dict[str, Any]:
        """See `OptimizerConfig.options`."""
        return {"lr": self.adamw_lr or self.lr} if kind == "AdamW" else {}

    def build(self, parameters: Sequence[NamedParameter], mesh: Mesh | None = None) -> Optimizer:
        """See `OptimizerConfig.build`."""
        from forge_trainer.optim.local_parameters import LocalOptimizer
        from forge_trainer.optim.muon_rule import MuonRule

        groups = self.param_groups(parameters)
        return LocalOptimizer(groups, {"AdamW": self._adamw}, ["AdamW"], {"Muon": MuonRule(self, mesh)})

    def _adamw(self, local_params: LocalParameters, group: Mapping[str, Any]) -> None:
        from forge_trainer.optim.adam_rule import adamw_step

        adamw_step(local_params, group, self.betas, self.eps)
