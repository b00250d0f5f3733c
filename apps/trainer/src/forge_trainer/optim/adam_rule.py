"""The step of AdamW on a rank's shards, for groups and dtypes that torch's optimizer does not support."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from forge_trainer.optim.local_parameters import LocalParameters


def adamw_step(
    local_params: LocalParameters,
    group: Mapping[str, Any],
    betas: tuple[float, float],
    eps: float,
    moments: torch.dtype | None = None,
    rounded: Callable[[int, Tensor], Tensor] | None = None,
) -> None:
    """Take a step of AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101 algorithm 2) by torch's fused kernel.

    Args:
        local_params: this rank's shards of the parameters.
        group: entries of the group.
        betas: decay rates of the two moments.
        eps: constant added to the root of the second moment.
        moments: dtype of both moments in memory; None for the dtype of the parameters, at least float32.
        rounded: see `LocalParameters.put_values`.
    """
    kept = (
        local_params.values,
        local_params.state("exp_avg", moments),
        local_params.state("exp_avg_sq", moments),
    )
    # the kernel for CPUs reads memory in order, whatever the strides say
    values, first, second, grads = (
        [tensor.contiguous() for tensor in one] for one in (*kept, local_params.grads)
    )
    steps = local_params.steps.unbind()
    for dtype in dict.fromkeys(local_params.wide):
        chosen = [index for index, wide in enumerate(local_params.wide) if wide == dtype]
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            *([one[index] for index in chosen] for one in (values, grads, first, second)),
            max_exp_avg_sqs=[],
            state_steps=[steps[index] for index in chosen],
            lr=group["lr"],
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=group["weight_decay"],
            eps=eps,
            amsgrad=False,
            maximize=False,
            found_inf=local_params.found_inf,
        )
    local_params.put("exp_avg", first)
    local_params.put("exp_avg_sq", second)
    local_params.put_values(values, rounded)
