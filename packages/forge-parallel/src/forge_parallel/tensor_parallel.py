"""Tensor, sequence and loss parallelism: gives each module its role, and cuts its parameters.

What a role does in the forward pass is in `forge_parallel.tensor_roles`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from forge_parallel.config import TensorParallelConfig
from forge_parallel.error import ParallelError
from forge_parallel.match import find
from forge_parallel.plan import Plan
from forge_parallel.tensor_roles import (
    ROLES,
    Axis,
    RoleModule,
    Tokenwise,
    VocabularyShard,
    tokenwise,
    values_of,
    with_role,
)


def tensor_parallel(model: nn.Module, plan: Plan, mesh: DeviceMesh, config: TensorParallelConfig) -> None:
    """Give each module its role, in place. Names of parameters do not change. Collective.

    Args:
        model: on the meta device, or with equal values on all ranks.
        plan: `tensor` and `divisible` are used.
        mesh: of one dim.
        config: the section `[tensor_parallel]`.

    Raises:
        ParallelError: a pattern names nothing, something cannot be cut evenly, or a parameter of the model is
            in no module with a role.
    """
    for name, size in plan.divisible.items():
        if size % mesh.size():
            raise ParallelError(
                f"{name} = {size} cannot be cut over tp = {mesh.size()} ranks; use a divisor of it"
            )
    if config.async_:
        _overlap(mesh)
    axis = Axis.of(mesh, config.sequence)
    cut: dict[int, nn.Parameter] = {}
    for pattern, role in plan.tensor.items():
        for name, module in find(model, pattern).items():
            if isinstance(module, Tokenwise) and role == "tokenwise":
                continue  # cut by expert parallelism already
            if isinstance(module, RoleModule):
                raise ParallelError(
                    f"{pattern!r} of the plan gives {name} a second role; say one role for each"
                )
            _require_kind(name, module, role)
            kind = tokenwise(tuple(module._parameters)) if role == "tokenwise" else ROLES[role]
            _distribute(name, module, kind.placements, mesh, cut)
            module.__class__ = with_role(type(module), kind)
            module.tensor_axis = axis  # type: ignore[assignment]
            if hasattr(module, "vocabulary"):
                first = axis.rank * (values_of(module._parameters["weight"]).shape[0])
                module.vocabulary = VocabularyShard(first, axis.group)  # type: ignore[assignment]
    plain = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if plain:
        raise ParallelError(f"no role under tensor parallelism for {', '.join(plain)}; name them in the plan")


def _overlap(mesh: DeviceMesh) -> None:
    """Let the compiler overlap matmuls with the collectives around them, in all that this process compiles.

    Raises:
        ParallelError: the ranks are no GPUs.
    """
    if mesh.device_type != "cuda":
        raise ParallelError(
            f"tensor_parallel.async = true needs GPUs that reach each other's memory, not a "
            f"{mesh.device_type}; set it to false"
        )
    import torch._inductor.config as inductor

    inductor._micro_pipeline_tp = True


def _require_kind(name: str, module: nn.Module, role: str) -> None:
    """Refuse modules whose forward does not do what the role assumes."""
    if role in ("colwise", "rowwise") and not isinstance(module, nn.Linear):
        raise ParallelError(f"{name} is a {type(module).__name__}; the role {role} is for nn.Linear")
    if role == "cut_norm" and type(module) is not nn.RMSNorm:
        raise ParallelError(
            f"{name} is a {type(module).__name__} over all heads, of which each rank has some; only "
            "nn.RMSNorm can be computed in parts: use mesh.tp = 1, normalize each head, or use an rmsnorm"
        )
    if role == "embed" and (not isinstance(module, nn.Embedding) or module.padding_idx is not None):
        raise ParallelError(f"{name} is {module}; the role embed is for nn.Embedding without padding_idx")


def _distribute(
    name: str,
    module: nn.Module,
    placements: Mapping[str, Placement],
    mesh: DeviceMesh,
    cut: dict[int, nn.Parameter],
) -> None:
    for key, parameter in module._parameters.items():
        if parameter is None or key not in placements:
            continue
        if id(parameter) not in cut:
            placement = placements[key]
            if isinstance(placement, Shard) and parameter.shape[placement.dim] % mesh.size():
                raise ParallelError(
                    f"dim {placement.dim} of {name}.{key} {tuple(parameter.shape)} cannot be cut over "
                    f"tp = {mesh.size()} ranks; make it a multiple of {mesh.size()} or use fewer ranks"
                )
            shared = nn.Parameter(
                distribute_tensor(parameter.detach(), mesh, [placement]),
                requires_grad=parameter.requires_grad,
            )
            cut[id(parameter)] = cut[id(shared)] = shared
        module._parameters[key] = cut[id(parameter)]
