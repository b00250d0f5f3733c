"""Averages the weights during training, and swaps the averages in for an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from forge_parallel.tensor import local_part
from torch import Tensor
from torch.optim import Optimizer

from forge_trainer.optim.base import EMA, OptimizerConfig


@torch.no_grad()
def average_weights(optimizer: Optimizer, decay: float, finite: Tensor) -> None:
    """Move the average of each parameter with optimizer state towards the value of the parameter.

    The average is part of the state of its parameter, with the same layout, in float32 or wider. It begins
    with the value of the parameter at the first call.

    Args:
        optimizer: the optimizer, after its step.
        decay: decay of the average, per step.
        finite: [] bool; if false, no average moves.
    """
    for parameter, state in optimizer.state.items():
        if not state:
            continue
        if EMA not in state:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            state[EMA] = parameter.detach().to(wide, copy=True)
        average = local_part(state[EMA])
        share = torch.where(finite, 1 - decay, 0.0).to(average)
        average.lerp_(local_part(parameter).to(average.dtype), share)


@contextmanager
def evaluation_weights(config: OptimizerConfig, optimizer: Optimizer) -> Iterator[None]:
    """Swap the averaged weights of `config.evaluated` into the parameters; restore every bit afterwards.

    Needs a second copy of the weights meanwhile, except for optimizers without averages.
    """
    originals: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for parameter, state in optimizer.state.items() if config.averages else ():
                if all(name in state for name in config.averages):
                    value = local_part(parameter)
                    originals.append((value, value.clone()))
                    value.copy_(config.evaluated(value, {n: local_part(state[n]) for n in config.averages}))
        yield
    finally:
        with torch.no_grad():
            for value, before in originals:
                value.copy_(before)
