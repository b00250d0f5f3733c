"""The step of AdamW on what a rank holds, for groups and number formats that torch's own does not take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from forge_trainer.optim.local_parameters import LocalParameters, foreach


def adamw_step(
    held: LocalParameters,
    group: Mapping[str, Any],
    betas: tuple[float, float],
    eps: float,
    moments: torch.dtype | None = None,
    rounded: Callable[[int, Tensor], Tensor] | None = None,
) -> None:
    """Decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101 algorithm 2), as in torch.

    Args:
        held: what this rank holds.
        group: its entries.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        moments: the dtype both are kept in; None for that of the parameters, at least float32.
        rounded: see `LocalParameters.put_values`.
    """
    lr, (beta1, beta2) = group["lr"], betas
    first = held.update("lerp", held.state("exp_avg", moments), held.grads, 1 - beta1)
    second = held.update("mul", held.state("exp_avg_sq", moments), beta2)
    foreach("addcmul_", second, held.grads, held.grads, 1 - beta2)
    steps = held.steps.double()
    roots = foreach("sqrt", second)
    foreach("div_", roots, held.each((1 - beta2**steps).sqrt()))
    foreach("add_", roots, eps)
    direction = foreach("div", first, roots)
    foreach("mul_", direction, held.each(-lr / (1 - beta1**steps)))
    values = held.update("mul", held.values, 1 - lr * group["weight_decay"])
    foreach("add_", values, direction)
    held.put("exp_avg", first)
    held.put("exp_avg_sq", second)
    held.put_values(values, rounded)
