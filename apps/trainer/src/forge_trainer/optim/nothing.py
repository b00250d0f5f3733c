"""The optimizer of a rank that has nothing to train, such as a frozen pipeline stage."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class NothingToTrain(Optimizer):
    """An optimizer without groups and without state.

    Args:
        lr: peak learning rate of the run, for the log.
    """

    def __init__(self, lr: float) -> None:
        # torch refuses an empty list
        super().__init__([torch.zeros(0, requires_grad=True)], {"lr": lr})
        self.param_groups.clear()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""
