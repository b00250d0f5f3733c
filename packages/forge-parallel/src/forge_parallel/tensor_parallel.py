"""Tensor, sequence and loss parallelism: gives each module its role, and cuts its parameters.

What a role does in the forward pass is in `forge_parallel.tensor_roles`.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from forge_parallel import capabilities
from forge_parallel.config import TensorParallelConfig
from forge_parallel.error import ParallelError
from forge_parallel.match import find, matches
from forge_parallel.plan import Plan
from forge_parallel.tensor_roles import (
    Axis,
    Colwise,
    CutNorm,
    Gather,
    Heads,
    Merge,
    Norm,
    Replicated,
    RoleModule,
    Rowwise,
    SharedCutNorm,
    SharedHeads,
    Tokenwise,
    tokenwise,
    unsharded,
    values_of,
    with_role,
)
from forge_parallel.vocabulary import Embed, Head, VocabularyShard

ROLES: dict[str, type[RoleModule]] = {
    "gather": Gather,
    "merge": Merge,
    "colwise": Colwise,
    "rowwise": Rowwise,
    "norm": Norm,
    "tokenwise": Tokenwise,
    "head_norm": Replicated,
    "replicated": Replicated,
    "cut_norm": CutNorm,
    "heads": Heads,
    "embed": Embed,
    "head": Head,
}


def role_of(module: nn.Module, role: str) -> type[RoleModule]:
    """The class that does what a role of a plan says for a module."""
    named = {"tokenwise": tokenwise, "unsharded": unsharded}
    return named[role](tuple(module._parameters)) if role in named else ROLES[role]


def tensor_parallel(model: nn.Module, plan: Plan, mesh: DeviceMesh, config: TensorParallelConfig) -> None:
    """Give each module its role, in place. Names of parameters do not change. Collective.

    Args:
        model: on the meta device, or with equal values on all ranks.
        plan: without mounts; `tensor`, `shared_heads` and `divisible` are used.
        mesh: of one dim.
        config: the section `[tensor_parallel]`.

    Raises:
        ParallelError: a pattern names nothing, something cannot be cut evenly, or a parameter of the model is
            in no module with a role; modules with unlike roles share a parameter.
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
    shared = {
        name: heads
        for pattern, heads in plan.shared_heads.items()
        for name in find(model, pattern)
        if heads % mesh.size()
    }
    # the role `unsharded` is for what has no role of its own
    for pattern, role in sorted(plan.tensor.items(), key=lambda item: item[1] == "unsharded"):
        for name, module in find(model, pattern).items():
            if isinstance(module, Tokenwise) and role == "tokenwise":
                continue  # cut by expert parallelism already
            if isinstance(module, RoleModule):
                raise ParallelError(
                    f"{pattern!r} of the plan gives {name} a second role; say one role for each"
                )
            for inner_name, inner in (
                _without_role(name, module, plan) if role == "unsharded" else [(name, module)]
            ):
                _give(inner_name, inner, role, axis, mesh, cut, shared.get(inner_name))
    plain = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if plain:
        raise ParallelError(
            f"no role under tensor parallelism for {', '.join(plain)}; name them in the plan, or in "
            "`tensor_roles` of the module that has them"
        )


def _without_role(name: str, module: nn.Module, plan: Plan) -> list[tuple[str, nn.Module]]:
    """The modules at and below one that have parameters and no role of their own.

    Raises:
        ParallelError: one is a layer of experts, which sum over ranks what would be equal on all of them.
    """
    below = list(module.named_modules(prefix=name))
    for inner, _ in below:
        if any(matches(pattern, inner) for pattern in plan.experts):
            raise ParallelError(
                f"{inner} is a layer of experts inside of {name}, whose role is whole; use mesh.tp = 1, or "
                "give each module a role"
            )
    return [(n, m) for n, m in below if m._parameters and not isinstance(m, RoleModule)]


def _give(
    name: str,
    module: nn.Module,
    role: str,
    axis: Axis,
    mesh: DeviceMesh,
    cut: dict[int, nn.Parameter],
    shared_heads: int | None,
) -> None:
    """One module its role."""
    _require_kind(name, module, role)
    kind = role_of(module, role)
    if shared_heads is not None:
        kind = _of_shared_heads(name, module, role, axis.size, shared_heads)
    _distribute(name, module, kind, mesh, cut)
    module.__class__ = with_role(type(module), kind)
    module.tensor_axis = axis  # type: ignore[assignment]
    if role != "unsharded" and hasattr(module, "vocabulary"):
        entries = module._parameters["weight"].shape[0]  # type: ignore[union-attr]
        module.vocabulary = VocabularyShard(axis, entries)  # type: ignore[assignment]


def _of_shared_heads(name: str, module: nn.Module, role: str, ranks: int, heads: int) -> type[SharedHeads]:
    """The role of a module whose heads several ranks share.

    Raises:
        ParallelError: no whole number of ranks shares each head, or its outputs are not those of so many.
    """
    kinds: dict[str, type[SharedHeads]] = {"colwise": SharedHeads, "cut_norm": SharedCutNorm}
    if role not in kinds:
        raise ParallelError(
            f"{name} is in `shared_heads` and has the role {role}; only {' and '.join(kinds)} make heads"
        )
    if ranks % heads:
        raise ParallelError(
            f"the {heads} heads of {name} can neither be cut over tp = {ranks} ranks nor be shared by as "
            "many ranks each; use a divisor or a multiple"
        )
    outputs = len(values_of(module._parameters["weight"]))
    if outputs % heads:
        raise ParallelError(
            f"{name} has {outputs} outputs, which are not those of {heads} heads; mend `shared_heads`"
        )
    module.num_shared_heads = heads  # type: ignore[assignment]
    return kinds[role]


def _overlap(mesh: DeviceMesh) -> None:
    """Let the compiler overlap matmuls with the collectives around them, in all that this process compiles.

    Raises:
        ParallelError: the ranks are no GPUs, or torch cannot let them use each other's memory.
    """
    if mesh.device_type != "cuda":
        raise ParallelError(
            f"tensor_parallel.async = true needs GPUs that reach each other's memory, not a "
            f"{mesh.device_type}; set it to false"
        )
    if not capabilities.share_memory(mesh.get_group()):
        raise ParallelError(
            "tensor_parallel.async = true, and torch has no allocator of memory that these GPUs share; "
            "nothing would be overlapped: set it to false"
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
    if role == "embed" and not _looks_up(module):
        raise ParallelError(
            f"{name} is {module}; the role embed is for the forward of nn.Embedding, which a subclass must "
            "not replace, without padding_idx, max_norm and scale_grad_by_freq"
        )


def _looks_up(module: nn.Module) -> bool:
    """Whether it does nothing but look rows up, which is what the role does in its place."""
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return False
    return module.padding_idx is None and module.max_norm is None and not module.scale_grad_by_freq


def _distribute(
    name: str,
    module: nn.Module,
    kind: type[RoleModule],
    mesh: DeviceMesh,
    cut: dict[int, nn.Parameter],
) -> None:
    for key, parameter in module._parameters.items():
        if parameter is None or key not in kind.placements:
            continue
        placement = kind.placements[key]
        if id(parameter) not in cut:
            if isinstance(placement, Shard) and not _can_be_cut(
                parameter.shape[placement.dim], mesh.size(), kind.uneven
            ):
                raise ParallelError(
                    f"dim {placement.dim} of {name}.{key} {tuple(parameter.shape)} cannot be cut over "
                    f"tp = {mesh.size()} ranks; make it a multiple of {mesh.size()} or use fewer ranks"
                )
            shared = nn.Parameter(
                distribute_tensor(parameter.detach(), mesh, [placement]),
                requires_grad=parameter.requires_grad,
            )
            cut[id(parameter)] = cut[id(shared)] = shared
        shared = cut[id(parameter)]
        if isinstance(shared, DTensor) and shared.placements != (placement,):
            raise ParallelError(
                f"{name}.{key} is also a parameter of another module, whose role cuts it otherwise; give "
                "both roles that cut alike, or untie them"
            )
        module._parameters[key] = shared


def _can_be_cut(length: int, ranks: int, uneven: bool) -> bool:
    """Into equal parts, or else into chunks of which only the last is shorter, and none empty."""
    return length > (ranks - 1) * -(-length // ranks) if uneven else length % ranks == 0
