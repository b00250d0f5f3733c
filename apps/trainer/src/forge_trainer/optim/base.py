"""What an optimizer plug is: a struct that builds a `torch.optim.Optimizer` from named parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from forge_config import Config, Meta, Registry

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from forge_trainer.optim.parameters import NamedParameter


class OptimizerConfig(Config):
    """Interface of `[optimizer]`.

    Attributes:
        lr: peak learning rate; the schedule multiplies it.
    """

    recorded_keys = ("lr",)

    lr: Annotated[float, Meta(gt=0)] = 3e-4

    def build(self, parameters: Sequence[NamedParameter]) -> Optimizer:
        """An optimizer whose groups hold each of the parameters once, and carry `initial_lr`."""
        raise NotImplementedError


optimizers = Registry("optimizer", OptimizerConfig, default="adamw")
