"""Weights to evaluate in place of those that are trained, for as long as somebody looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from forge_parallel.tensor import local_part
from torch import Tensor
from torch.optim import Optimizer

from forge_trainer.optim.base import OptimizerConfig


@contextmanager
def evaluation_weights(config: OptimizerConfig, optimizer: Optimizer) -> Iterator[None]:
    """Parameters hold what `config.evaluated` makes of them; afterwards the very bits that they held.

    Costs a second copy of the weights meanwhile; nothing where training and evaluation share the weights.
    """
    held: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for parameter, state in optimizer.state.items() if config.averages else ():
                if all(name in state for name in config.averages):
                    value = local_part(parameter)
                    held.append((value, value.clone()))
                    value.copy_(config.evaluated(value, {n: local_part(state[n]) for n in config.averages}))
        yield
    finally:
        with torch.no_grad():
            for value, before in held:
                value.copy_(before)
