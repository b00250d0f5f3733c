"""The order in which a model is made parallel, and how it gets its weights afterwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from forge_parallel.activation_checkpointing import checkpoint_activations
from forge_parallel.compile import compile_blocks
from forge_parallel.config import ParallelConfig, TensorParallelConfig
from forge_parallel.error import ParallelError
from forge_parallel.match import find
from forge_parallel.mesh import Mesh
from forge_parallel.plan import Plan
from forge_parallel.tensor import is_dtensor, local_part, local_shard
from forge_parallel.units import find_units

_APPLIED = "_forge_parallel_config"
"""The attribute of a model that holds the `ParallelConfig` that was applied to it."""

_SCALES = "_forge_parallel_scales"
"""The attribute of a model that holds the scales of weights that are gathered in 8 bits."""


def parallelize(model: nn.Module, mesh: Mesh, plan: Plan, config: ParallelConfig | None = None) -> nn.Module:
    """Make a model parallel: FP8, EP, TP, CP, activation checkpointing, compile, FSDP2, in this order.

    Collective. In place. Each step wraps the result of the one before: 8-bit layers are sharded like others,
    checkpointing repeats the collectives of the parallel axes, the compiler sees the checkpointed forward,
    and FSDP2 shards the remaining axes with hooks that stay outside of compiled code.

    Args:
        model: any module, best on the meta device; afterwards call `materialize` and fill it.
        mesh: from `build_mesh`; its device decides the compute format of `auto`.
        plan: the parallel plan of the model.
        config: the sections to apply; the defaults of each section when it is missing.

    Returns:
        The same model.

    Raises:
        ParallelError: a pattern or a mount of the plan matches nothing; units overlap or share a parameter;
            the number format needs a process group and there is none; or the model is parallel already.
    """
    config = config or ParallelConfig()
    compute = config.precision.compute_dtype(mesh.device.type)
    if hasattr(model, _APPLIED):
        raise ParallelError(f"{type(model).__name__} was parallelized before; build a new one")
    if mesh.fsdp is None and config.needs_group(mesh.device.type):
        raise ParallelError(
            f"compute in {compute} with float32 masters, and fsdp.offload, are done by FSDP2, which needs a "
            "process group even for one process: process_group(env, needed=True), then build_mesh"
        )
    plan.check(model)
    plan = plan.flat()
    if plan.experts:
        config.require_experts()
    units = find_units(model, plan, mesh)
    if not units.block_modules and mesh.pipeline.size == 1:
        _require_no_blocks(config)
    _set_masters(model, config.precision.pure_bf16)
    if config.fp8.recipe != "none":
        from forge_parallel.fp8 import use_fp8

        use_fp8(model, plan, config.fp8, mesh)
    _apply_axes(model, mesh, plan, config)
    experts = [layer for pattern in plan.experts for layer in find(model, pattern).values()]
    served_elsewhere = [] if mesh.ep is None else experts
    checkpoint_activations(units.block_modules, config.activation_checkpointing, served_elsewhere)
    if config.compile.enabled:
        compile_blocks(units.block_modules, config.compile, mesh, experts)
    if mesh.fsdp is not None:
        from forge_parallel.fsdp import shard

        shard(
            model,
            units,
            mesh.fsdp,
            getattr(torch, compute),
            config.fsdp,
            mesh.pipeline.size > 1,
            plan.host_inputs,
        )
        if config.fp8.gather:
            from forge_parallel.fp8 import Scales

            setattr(model, _SCALES, Scales(model, mesh.fsdp))
    setattr(model, _APPLIED, config)
    return model


def _require_no_blocks(config: ParallelConfig) -> None:
    """Refuse options that work on blocks, for a model whose plan names none."""
    mode = config.activation_checkpointing.mode
    asked = {f'activation_checkpointing.mode = "{mode}"': mode != "none"}
    asked["compile.enabled = true"] = config.compile.enabled
    if named := [key for key, is_so in asked.items() if is_so]:
        raise ParallelError(
            f"{named[0]}, and the plan of the model names no blocks; name them in `blocks`, or mount the "
            "plans of its parts (`mounts`)"
        )


def _apply_axes(model: nn.Module, mesh: Mesh, plan: Plan, config: ParallelConfig) -> None:
    """Apply expert, tensor and context parallelism."""
    if mesh.ep is not None:
        from forge_parallel.expert_parallel import expert_parallel

        expert_parallel(model, plan, mesh, config)
    if mesh.tp is not None:
        from forge_parallel.tensor_parallel import tensor_parallel

        tensor_parallel(model, plan, mesh.tp, config.tensor_parallel)
    if mesh.context.size > 1:
        from forge_parallel.context_parallel import context_parallel

        context_parallel(model, plan, mesh.context, config.context_parallel)
    if plan.experts:
        _share_tokens(model, plan.experts, mesh, config.tensor_parallel)


def _share_tokens(model: nn.Module, experts: list[str], mesh: Mesh, config: TensorParallelConfig) -> None:
    """Give layers of experts their sums over ranks with other tokens of the same sequences, and of any."""
    sequence = config.sequence
    groups = [mesh.tp.get_group()] if mesh.tp is not None and sequence else []
    groups += [mesh.context.group] if mesh.context.group is not None else []

    def sum_(tensor: Tensor) -> Tensor:
        for group in groups:
            torch.distributed.all_reduce(tensor, group=group)
        return tensor

    # ranks of tp that have the same tokens count all of them equally often
    sums = {"sum_over_sequence": sum_ if groups else None}
    sums["sum_over_batch"] = mesh.stage.sum_ if mesh.stage.size > 1 else None
    given: dict[str, Any] = {name: each for name, each in sums.items() if each is not None}
    if mesh.tp is not None and sequence:
        ranks, rank = mesh.tp.size(), mesh.tp.get_local_rank()
        given["tokens_here"] = lambda tokens: tokens.chunk(ranks, 1)[rank]
    if mesh.tp is not None and config.experts == "cut":
        from forge_parallel.tensor_roles import Axis

        given["spread"] = Axis.of(mesh.tp, sequence)
    for layer in (layer for pattern in experts for layer in find(model, pattern).values()):
        if "spread" in given and not hasattr(layer, "spread"):
            raise ParallelError(
                f'tensor_parallel.experts = "cut", and a {type(layer).__name__} has no attribute `spread`; '
                'use "whole"'
            )
        for name in (name for name in given if hasattr(layer, name)):
            setattr(layer, name, given[name])


@torch.no_grad()
def _set_masters(model: nn.Module, pure_bf16: bool) -> None:
    """Keep parameters in bfloat16, or at least in float32; buffers, such as position tables, do not change.

    A foreign model may come in bfloat16, in which small updates would be rounded away.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            wide = torch.promote_types(parameter.dtype, torch.float32)
            parameter.data = parameter.data.to(torch.bfloat16 if pure_bf16 else wide)


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device) -> nn.Module:
    """Allocate the memory of a model on the meta device, filled with NaN so that an unset value shows.

    Tied parameters stay tied. Under `[fsdp] offload` parameters are on the host, and buffers on the device.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places[id(parameter)].append((module, name))
    parameter_device = torch.device("cpu") if applied(model).fsdp.offload else device
    model._apply(lambda x: _empty(x, parameter_device if isinstance(x, nn.Parameter) else device))
    for (first, name), *others in places.values():
        for module, alias in others:
            module._parameters[alias] = first._parameters[name]
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            local_part(tensor).fill_(float("nan"))
    return model


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    """Allocate memory for a tensor; `empty_like` of a meta tensor would load the compiler (seconds)."""
    if is_dtensor(tensor):
        return torch.empty_like(tensor, device=device)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


@torch.no_grad()
def load_full(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy full tensors into a model, one after the other; each rank copies its own part of each.

    Args:
        model: sharded or not, materialized.
        tensors: every parameter and buffer by name, non-persistent buffers too (`materialize` wiped them). A
            parameter with several names needs only one. Each tensor is read once, so that a mapping may load
            them from disk one by one.

    Raises:
        ParallelError: names or shapes differ from the parameters and buffers of the model; lists them. If
            only shapes differ, tensors that fit have been copied.
    """
    own = dict(
        [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    )
    given = {id(own[name]) for name in tensors if name in own}
    missing = sorted(name for name, tensor in own.items() if id(tensor) not in given)
    extra = sorted(tensors.keys() - own.keys())
    shapes = []
    for name, tensor in tensors.items():
        if name in own and tensor.shape != own[name].shape:
            shapes.append(f"{name}: {tuple(tensor.shape)}, wanted {tuple(own[name].shape)}")
        elif not missing and not extra:
            values, offsets, _ = local_shard(own[name])
            part = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
            values.copy_(tensor[part])
    if missing or extra or shapes:
        raise ParallelError(
            f"these are not the weights: missing {missing}, left over {extra}, other shapes {shapes}"
        )


def applied(model: nn.Module) -> ParallelConfig:
    """Return the config that `parallelize` applied to a model."""
    return getattr(model, _APPLIED, ParallelConfig())


def reshard(model: nn.Module) -> None:
    """Free parameters that a forward pass left gathered, so that the next pass sees later writes.

    Does nothing on a model that is not sharded.
    """
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync"):
            module.reshard()  # type: ignore[operator]


def set_sync(model: nn.Module, last: bool) -> None:
    """Announce each micro-batch as the last of a step or not; the last one sums gradients over ranks.

    See `forge_parallel.fsdp.set_sync`. Does nothing on a model that is not sharded.
    """
    if hasattr(model, "set_requires_gradient_sync"):
        from forge_parallel import fsdp

        fsdp.set_sync(cast(Any, model), last, applied(model).fsdp)
    if (scales := getattr(model, _SCALES, None)) is not None:
        scales.last = last
