"""Sharding parameters, gradients and optimizer state over data ranks with FSDP2."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from forge_parallel.units import Units


def shard(model: nn.Module, units: Units, root: DeviceMesh, compute: torch.dtype, again: bool = True) -> None:
    """Shard in place: each unit over its mesh, and the rest as the root. Collective.

    Gradients are summed, not averaged, over ranks, in float32 (float64 for a model in float64): the loss is
    divided by the global count of valid targets. A mesh of two axes replicates over the first and shards over
    the second (HSDP).

    Args:
        model: on any device, best meta.
        units: from `find_units`.
        root: the mesh of what is in no unit.
        compute: the format of matmuls and activations.
        again: free the parameters of a unit after its forward pass, and gather them again for the backward.
    """
    stored = {parameter.dtype for parameter in model.parameters()}
    policy = MixedPrecisionPolicy(
        param_dtype=compute if compute != torch.float32 else None,
        reduce_dtype=torch.float64 if torch.float64 in stored else torch.float32,
        cast_forward_inputs=False,
    )
    # What runs last is needed again at once in the backward pass: gathering it anew would be for nothing.
    last = units.blocks[-1:] + units.groups[-1:]
    for unit in [*units.blocks, *units.groups]:
        free = again and unit not in last
        fully_shard(unit.modules, mesh=unit.mesh, mp_policy=policy, reshard_after_forward=free)
    fully_shard(model, mesh=root, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo cannot pre-multiply, and a plain sum is what is wanted everywhere
            module.set_force_sum_reduction_for_comms(True)
