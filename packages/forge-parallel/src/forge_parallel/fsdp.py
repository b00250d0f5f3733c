"""Sharding parameters, gradients and optimizer state over data ranks with FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from forge_parallel.config import FSDPConfig
from forge_parallel.units import Units


def shard(
    model: nn.Module,
    units: Units,
    root: DeviceMesh,
    compute: torch.dtype,
    config: FSDPConfig,
    pipeline: bool = False,
    host_inputs: Sequence[str] = (),
) -> None:
    """Shard in place: each unit over its mesh, and the rest as the root. Collective.

    Gradients are summed, not averaged, over ranks, in float32 (float64 for a model in float64): the loss is
    divided by the global count of valid targets. A mesh of two axes replicates over the first and shards over
    the second (HSDP).

    Args:
        model: on any device, best meta.
        units: from `find_units`.
        root: the mesh of the modules in no unit.
        compute: the format of matmuls and activations.
        config: the section `[fsdp]`.
        pipeline: whether the model is a pipeline stage, whose units stay gathered because many micro-batches
            pass forward before the first one passes backward.
        host_inputs: arguments of the model that are not moved to its device.
    """
    stored = {parameter.dtype for parameter in model.parameters()}
    policy = MixedPrecisionPolicy(
        param_dtype=compute if compute != torch.float32 else None,
        reduce_dtype=torch.float64 if torch.float64 in stored else torch.float32,
        cast_forward_inputs=False,
    )
    on_gpu = root.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=on_gpu) if config.offload else OffloadPolicy()
    options: Any = {"mp_policy": policy, "offload_policy": offload}
    # What runs last is needed again at once in the backward pass: gathering it anew would be for nothing.
    last = units.blocks[-1:] + units.groups[-1:]
    # experts lie in blocks, and what lies inside is sharded first
    for unit in [*units.experts, *units.blocks, *units.groups]:
        free = config.reshard == "after_forward" and not pipeline and unit not in last
        fully_shard(unit.modules, mesh=unit.mesh, reshard_after_forward=free, **options)
    fully_shard(model, mesh=root, reshard_after_forward=False, **options)
    if host_inputs:
        _leave_on_host(model, host_inputs)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo cannot pre-multiply, and a plain sum is what is wanted everywhere
            module.set_force_sum_reduction_for_comms(True)
    if config.prefetch:
        _prefetch(units.block_modules, config.prefetch)


def _leave_on_host(model: nn.Module, names: Sequence[str]) -> None:
    """Take inputs out before FSDP2 moves all tensors to its device, which would make the host wait."""
    kept: dict[str, Any] = {}

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kept.clear()
        kept.update({name: kwargs[name] for name in names if name in kwargs})
        return args, {name: value for name, value in kwargs.items() if name not in kept}

    def give(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | kept

    model.register_forward_pre_hook(take, prepend=True, with_kwargs=True)
    model.register_forward_pre_hook(give, with_kwargs=True)


def _prefetch(blocks: list[Any], ahead: int) -> None:
    """Gather the next blocks when a block begins; in the backward pass, the blocks before it."""
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - ahead) : index][::-1])


def set_sync(model: FSDPModule, last: bool, config: FSDPConfig) -> None:
    """Announce each micro-batch as the last of a step or not; the last one sums gradients over ranks.

    With `[fsdp] reduce_gradients = "every_micro_batch"`, each one sums them over the ranks that share a copy
    of the model. Units that `[fsdp] reshard` keeps gathered are freed with the last.
    """
    model.set_requires_gradient_sync(last or config.reduce_gradients == "every_micro_batch")
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(last or config.reshard != "after_step")
