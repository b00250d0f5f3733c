"""Sharding parameters, gradients and optimizer state over data ranks with FSDP2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    solo: Sequence[Sequence[nn.Module]],
    device_mesh: DeviceMesh,
    compute: torch.dtype,
) -> None:
    """Shard in place: each block, each solo group, and the rest as the root. Collective.

    Gradients are summed, not averaged, over ranks: the loss is divided by the global count of valid
    targets. A mesh of two axes replicates over the first and shards over the second (HSDP).
    """
    policy = MixedPrecisionPolicy(
        param_dtype=compute if compute != torch.float32 else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for block in blocks:
        fully_shard(block, mesh=device_mesh, mp_policy=policy)
    for index, group in enumerate(solo):
        # The last group runs last and its backward starts at once: gathering it again would be for nothing.
        again = index < len(solo) - 1
        fully_shard(list(group), mesh=device_mesh, mp_policy=policy, reshard_after_forward=again)
    fully_shard(model, mesh=device_mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo cannot pre-multiply, and a plain sum is what is wanted everywhere
            module.set_force_sum_reduction_for_comms(True)
