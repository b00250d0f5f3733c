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
"""Factor on the orthogonal update of a matrix of A rows (outputs) and B columns (inputs): sqrt(max(1, A/B));
0.2 sqrt(max(A, B)), so that learning rates and decays of AdamW can be kept; sqrt(A/B)."""


@optimizers.register("muon")
class MuonConfig(OptimizerConfig):
    """Orthogonal updates for matrices, AdamW for everything else.

    Momentum stays where the parameters are. Each whole matrix is worked on by one rank, and all ranks have
    about equally much to do; two collectives for each bucket of matrices bring them there and back. A matrix
    without a gradient, on one rank or on all, has one of zeros: it decays.

    Attributes:
        scale: of the update of A x B matrices: `original` is sqrt(max(1, A/B)), `match-rms-adamw`
            0.2 sqrt(max(A, B)), `spectral` sqrt(A/B). There is no default: learning rates differ by it.
        roles: of the matrices that get orthogonal updates; stacked ones (experts) each for itself.
        momentum: of the average of gradients.
        nesterov: look ahead by one step of momentum.
        ns_steps: Newton-Schulz iterations.
        compute: number format of matrices while they travel and are worked on; `auto` is bfloat16 on GPUs and
            float32 on CPUs.
        adamw_lr: learning rate of everything else; absent means `lr`.
        betas: of AdamW.
        eps: of AdamW.
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

    def _adamw(self, held: LocalParameters, group: Mapping[str, Any]) -> None:
        from forge_trainer.optim.adam_rule import adamw_step

        adamw_step(held, group, self.betas, self.eps)
