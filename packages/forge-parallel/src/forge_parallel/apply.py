"""The order in which a model is made parallel, and how it gets its weights afterwards."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from forge_parallel.config import CompileConfig, PrecisionConfig, RematConfig
from forge_parallel.error import ParallelError
from forge_parallel.match import find
from forge_parallel.mesh import Mesh
from forge_parallel.plan import Plan
from forge_parallel.remat import rematerialize
from forge_parallel.tensor import local_chunk, local_part

_DONE = "_forge_parallelized"


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    plan: Plan,
    *,
    device_type: str = "cpu",
    precision: PrecisionConfig | None = None,
    remat: RematConfig | None = None,
    compile: CompileConfig | None = None,
) -> nn.Module:
    """Make a model parallel in place: rematerialize -> compile -> FSDP2. Collective.

    Args:
        model: any module, best on the meta device; then call `materialize` and fill it.
        mesh: from `build_mesh`.
        plan: what the model allows.
        device_type: where it will run; decides the compute format of `auto`.
        precision: number formats.
        remat: which activations are made again.
        compile: whether blocks are compiled.

    Returns:
        The same model.

    Raises:
        ParallelError: a pattern of the plan names nothing, or the model was made parallel before.
    """
    precision, remat, compile = (
        precision or PrecisionConfig(),
        remat or RematConfig(),
        compile or CompileConfig(),
    )
    if getattr(model, _DONE, False):
        raise ParallelError(f"{type(model).__name__} was parallelized before; build a new one")
    plan.check(model)
    blocks = list(find(model, plan.blocks).values())
    solo = [[module for pattern in group for module in find(model, pattern).values()] for group in plan.solo]
    if precision.pure_bf16:
        model.to(torch.bfloat16)
    if remat.mode == "full":
        rematerialize(blocks)
    if compile.enabled:
        for block in blocks:
            # The forward alone: the hooks of FSDP2 stay outside and eager.
            block.forward = torch.compile(block.forward, backend=compile.backend, fullgraph=True)
    if mesh.device_mesh is not None:
        from forge_parallel.fsdp import shard

        shard(model, blocks, solo, mesh.device_mesh, getattr(torch, precision.compute_dtype(device_type)))
    setattr(model, _DONE, True)
    return model


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device) -> nn.Module:
    """Give a model on the meta device memory, poisoned with NaN so that nothing stays unset unseen."""
    model.to_empty(device=device)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            local_part(tensor).fill_(float("nan"))
    return model


@torch.no_grad()
def load_full(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Fill a (sharded) model from whole tensors; each rank copies its part.

    Raises:
        ParallelError: names or shapes differ from the parameters and buffers of the model; lists them.
    """
    own = dict([*model.named_parameters(), *model.named_buffers()])
    shapes = [f"{n}: {tuple(tensors[n].shape)}, wanted {tuple(own[n].shape)}" for n in own if n in tensors
              and tensors[n].shape != own[n].shape]  # fmt: skip
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or extra or shapes:
        raise ParallelError(
            f"these are not the weights: missing {missing}, left over {extra}, other shapes {shapes}"
        )
    for name, parameter in own.items():
        local, offsets = local_chunk(parameter)
        part = tuple(slice(o, o + n) for o, n in zip(offsets, local.shape, strict=True))
        local.copy_(tensors[name][part])


def set_sync(model: nn.Module, last: bool) -> None:
    """Say whether the next backward pass is the last of a step: only that one reduces gradients."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
        model.set_is_last_backward(last)  # type: ignore[operator]
