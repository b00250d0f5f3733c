"""Tensor, sequence and loss parallelism: gives each module its role, and shards its parameters.

`forge_parallel.tensor_roles` has the forward pass of each role.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

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
    CutExperts,
    CutNorm,
    CutNormWithUnits,
    Gather,
    GatherColwise,
    Heads,
    Merge,
    Norm,
    Replicated,
    RoleModule,
    Rowwise,
    Tokenwise,
    WithUnits,
    cut_experts,
    placed,
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
    "gather_colwise": GatherColwise,
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
    """Return the class that implements a role of a plan for a module."""
    named = {"tokenwise": tokenwise, "unsharded": unsharded}
    if role == "experts":
        return cut_experts(placed(f"a module of the role {role}", module))
    return named[role](tuple(module._parameters)) if role in named else ROLES[role]


def tensor_parallel(model: nn.Module, plan: Plan, mesh: DeviceMesh, config: TensorParallelConfig) -> None:
    """Give each module its role, in place. Names of parameters do not change. Collective.

    Args:
        model: on the meta device, or with equal values on all ranks.
        plan: the flat plan; uses `tensor`, `output_units`, `counts` and `divisible`.
        mesh: a device mesh of one dim.
        config: the section `[tensor_parallel]`.

    Raises:
        ParallelError: a pattern matches nothing, something cannot be cut evenly, a parameter of the model is
            in no module with a role, or modules with different roles share a parameter.
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
    units = {name: counts for pattern, counts in plan.output_units.items() for name in find(model, pattern)}
    for name, role in _named_roles(model, plan, config).items():
        module = model.get_submodule(name)
        for inner_name, inner in (
            _without_role(name, module, plan) if role == "unsharded" else [(name, module)]
        ):
            _give(inner_name, inner, role, axis, mesh, cut, units.get(inner_name, []))
    _divide_counts(model, plan.counts, axis.size)
    plain = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if plain:
        raise ParallelError(
            f"no role under tensor parallelism for {', '.join(plain)}; name them in the plan, or in "
            "`tensor_roles` of the module that has them"
        )


def _named_roles(model: nn.Module, plan: Plan, config: TensorParallelConfig) -> dict[str, str]:
    """Return the role of each module that needs one, by name; last `unsharded`, for all without another.

    Raises:
        ParallelError: a module has two roles.
    """
    of_experts = _roles_of_experts(model, plan, config)
    roles: dict[str, str] = {}
    for pattern, role in sorted(plan.tensor.items(), key=_is_last):
        for name, module in find(model, pattern).items():
            if name in of_experts or (isinstance(module, Tokenwise) and role == "tokenwise"):
                continue  # cut by expert parallelism already
            if name in roles or isinstance(module, RoleModule):
                raise ParallelError(
                    f"{pattern!r} of the plan gives {name} a second role; say one role for each"
                )
            roles[name] = role
    for name, role in of_experts.items():
        if not isinstance(model.get_submodule(name), CutExperts):
            roles[name] = role
    return dict(sorted(roles.items(), key=_is_last))


def _is_last(item: tuple[str, str]) -> bool:
    return item[1] == "unsharded"


def _roles_of_experts(model: nn.Module, plan: Plan, config: TensorParallelConfig) -> dict[str, str]:
    """Return the roles, by name, that replace others where experts are cut; none where experts are whole.

    Raises:
        ParallelError: the plan does not say for all layers of experts how they are cut.
    """
    if config.experts == "whole":
        return {}
    roles = {name: role for pattern, role in plan.cut_experts.items() for name in find(model, pattern)}
    layers = [name for pattern in plan.experts for name in find(model, pattern)]
    if missing := [name for name in layers if roles.get(f"{name}.experts") != "experts"]:
        raise ParallelError(
            f'tensor_parallel.experts = "cut", and `cut_experts` of the plan does not give {missing[0]}'
            '.experts the role experts; use "whole"'
        )
    return roles


def _without_role(name: str, module: nn.Module, plan: Plan) -> list[tuple[str, nn.Module]]:
    """Return the modules at and below a module that have parameters and no role of their own.

    Raises:
        ParallelError: one is a layer of experts, which would sum over ranks what is equal on all of them.
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
    output_units: list[int],
) -> None:
    """Give one module its role."""
    _require_kind(name, module, role)
    kind = role_of(module, role)
    if output_units and (len(output_units) > 1 or output_units[0] % axis.size):
        kind = _with_units(name, module, role, axis.size, output_units)
    _distribute(name, module, kind, mesh, cut)
    module.__class__ = with_role(type(module), kind)
    module.tensor_axis = axis  # type: ignore[assignment]
    if role != "unsharded" and hasattr(module, "vocabulary"):
        entries = module._parameters["weight"].shape[0]  # type: ignore[union-attr]
        module.vocabulary = VocabularyShard(axis, entries)  # type: ignore[assignment]


def _with_units(name: str, module: nn.Module, role: str, ranks: int, units: list[int]) -> type[WithUnits]:
    """Return the role of a module whose outputs cannot be cut into one piece for each rank.

    Raises:
        ParallelError: its role makes no outputs, units cannot be given to ranks equally, or its outputs do
            not have this number of units.
    """
    kinds: dict[str, type[WithUnits]] = {"colwise": WithUnits, "cut_norm": CutNormWithUnits}
    if role not in kinds:
        raise ParallelError(
            f"{name} is in `output_units` and has the role {role}; they are for {' and '.join(kinds)}"
        )
    if uneven := [count for count in units if count % ranks and ranks % count]:
        raise ParallelError(
            f"{uneven[0]} units of {name} can neither be cut over tp = {ranks} ranks nor be shared by as "
            "many ranks each; use a divisor or a multiple"
        )
    outputs = len(values_of(module._parameters["weight"]))
    if outputs % sum(units):
        raise ParallelError(
            f"{name} has {outputs} outputs, which are not those of {units} units; mend `output_units`"
        )
    module.tensor_units = tuple(units)  # type: ignore[assignment]
    return kinds[role]


def _divide_counts(model: nn.Module, counts: Mapping[str, list[str]], ranks: int) -> None:
    """Divide the counts of modules by the ranks; a count of units that several ranks share becomes one.

    Raises:
        ParallelError: a module has no such attribute, or ranks cannot have equally many.
    """
    for pattern, names in counts.items():
        for module_name, module in find(model, pattern).items():
            for name in names:
                holder: Any = module
                path, _, leaf = name.rpartition(".")
                for part in path.split(".") if path else ():
                    own = copy(getattr(holder, part, None))  # others may have the same
                    setattr(holder, part, own)
                    holder = own
                count = getattr(holder, leaf, None)
                if not isinstance(count, int) or count < 1:
                    raise ParallelError(
                        f"{module_name}.{name} is {count!r}, and not the number of anything; mend `counts`"
                    )
                if count % ranks and ranks % count:
                    raise ParallelError(
                        f"{module_name}.{name} = {count} can neither be cut over tp = {ranks} ranks nor be "
                        "shared by as many ranks each; use a divisor or a multiple"
                    )
                setattr(holder, leaf, max(1, count // ranks))


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
    """Refuse modules of a type that the role does not support."""
    if role in ("colwise", "gather_colwise", "rowwise") and not isinstance(module, nn.Linear):
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
    """Whether a module only looks rows up, so that the role can replace its forward."""
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
    """Whether a length can be cut into equal parts; with `uneven`, the last may be shorter but not empty."""
    return length > (ranks - 1) * -(-length // ranks) if uneven else length % ranks == 0
