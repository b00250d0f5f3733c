"""The interface of an optimizer plug: a struct that builds a `torch.optim.Optimizer`."""

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
"""The decay of a moment, per step."""

EMA = "ema"
"""The name, in the state of an optimizer, of the moving average of a parameter."""


class OptimizerConfig(Config):
    """Interface of `[optimizer]`.

    Attributes:
        lr: peak learning rate; the schedule multiplies it.
        weight_decay: weight decay per step; multiplied by the learning rate.
        no_decay: roles of parameters that do not decay, from `embedding head norm matrix bias router expert`.
        groups: settings of selected parameters: factors, and steps in which they are frozen.
        ema_decay: decay, per step, of an exponential moving average of the weights, which begins with the
            weights after the first step; evaluation and export use it. 0 keeps no average.
        needs_constant_lr: whether the optimizer replaces the decay of the learning rate.
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
        """The names of optimizer states that evaluation needs beside the weights; see `evaluated`."""
        return (EMA,) if self.ema_decay else ()

    def build(self, parameters: Sequence[NamedParameter], mesh: Mesh | None = None) -> Optimizer:
        """Build the optimizer, with the groups of `param_groups`. Collective.

        All changing state belongs to parameters, not to groups, as ranks may hold different parameters.

        Args:
            parameters: the trained parameters of this rank's parts of the model.
            mesh: the grid of ranks; None in a single process.
        """
        raise NotImplementedError

    def evaluated(self, value: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return the weights to evaluate and export, if they differ from the trained weights.

        Args:
            value: a parameter, or this rank's shard of it.
            state: optimizer state of the names `averages`, with the same sharding.
        """
        return state[EMA].to(value.dtype)

    def kind(self, parameter: NamedParameter) -> str:
        """Return the kind of update of a parameter; each kind has separate groups."""
        return type(self).__name__.removesuffix("Config")

    def options(self, kind: str) -> dict[str, Any]:
        """Return further entries of the groups of a kind; `lr` and `weight_decay` override the defaults."""
        return {}

    def param_groups(self, parameters: Sequence[NamedParameter]) -> list[dict[str, Any]]:
        """Return parameter groups in the format of torch; each parameter is in exactly one."""
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
