"""What an optimizer plug is: a struct that builds a `torch.optim.Optimizer` from named parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from forge_config import Config, Meta, Registry

from forge_trainer.optim.groups import GroupRule, Role, group

if TYPE_CHECKING:
    from forge_parallel.mesh import Mesh
    from torch import Tensor
    from torch.optim import Optimizer

    from forge_trainer.optim.parameters import NamedParameter

Decay = Annotated[float, Meta(ge=0, lt=1)]
"""Of a moment, per step."""

EMA = "ema"
"""The name, in the state of an optimizer, of the moving average of a parameter."""


class OptimizerConfig(Config):
    """Interface of `[optimizer]`.

    Attributes:
        lr: peak learning rate; the schedule multiplies it.
        weight_decay: per step, times the learning rate.
        no_decay: roles of parameters that do not decay: of `embedding head norm matrix bias router expert`.
        groups: what is special about some parameters: factors, and steps in which they are frozen.
        ema_decay: per step, of an exponential moving average of the weights that begins with those after the
            first step; evaluation and export use it. 0 keeps none.
        needs_constant_lr: whether it does itself what a decay is for.
    """

    needs_constant_lr: ClassVar[bool] = False

    recorded_keys = ("lr", "weight_decay", "no_decay", "groups")

    lr: Annotated[float, Meta(gt=0)] = 3e-4
    weight_decay: Annotated[float, Meta(ge=0)] = 0.1
    no_decay: tuple[Role, ...] = ("norm", "bias")
    groups: tuple[GroupRule, ...] = ()
    ema_decay: Decay = 0.0

    @property
    def averages(self) -> tuple[str, ...]:
        """State of the optimizer that evaluation needs beside the weights; see `evaluated`."""
        return (EMA,) if self.ema_decay else ()

    def build(self, parameters: Sequence[NamedParameter], mesh: Mesh | None = None) -> Optimizer:
        """Build the optimizer, with the groups of `param_groups`. Collective.

        All changing state belongs to parameters, not to groups: ranks may hold different parameters.

        Args:
            parameters: those that are trained, of the parts that this rank holds.
            mesh: the grid of ranks; None in a lone process.
        """
        raise NotImplementedError

    def evaluated(self, value: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """The weights to evaluate and to export, where they are others than those that are trained.

        Args:
            value: a parameter, or this rank's part of it.
            state: of the optimizer, of the names `averages`, in the same part.
        """
        return state[EMA].to(value.dtype)

    def kind(self, parameter: NamedParameter) -> str:
        """The kind of update of a parameter; each kind has groups of its own."""
        return type(self).__name__.removesuffix("Config")

    def options(self, kind: str) -> dict[str, Any]:
        """Further entries of the groups of a kind; `lr` and `weight_decay` take the place of those of all."""
        return {}

    def param_groups(self, parameters: Sequence[NamedParameter]) -> list[dict[str, Any]]:
        """Groups as torch wants them, each parameter in one."""
        made = []
        grouped = group(parameters, self.groups, self.no_decay, self.kind)
        for kind, (lr, decay, frozen, curves), members in grouped:
            entry = {"lr": self.lr, "weight_decay": self.weight_decay} | self.options(kind)
            entry |= {"lr": entry["lr"] * lr, "weight_decay": entry["weight_decay"] * decay}
            entry |= {"kind": kind, "initial_lr": entry["lr"], "frozen": [list(stage) for stage in frozen]}
            entry |= {"curves": [[list(stage) for stage in curve] for curve in curves]} if curves else {}
            made.append({"params": [(p.name, p.parameter) for p in members]} | entry)
        return made


optimizers = Registry("optimizer", OptimizerConfig, default="adamw")
