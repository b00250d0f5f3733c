"""Expert parallelism: each rank has some of the experts of a layer, and tokens travel to them and back.

A layer of experts is any module with two attributes: `experts`, a module whose parameters all have the
number of experts as their first dim, called with (rows, ends); and `dispatch`, called with (experts, rows,
ends) in its place. This module replaces `dispatch` by a class of `forge_parallel.dispatch`, or by another
one that is registered in `forge_parallel.dispatch_config`. A further argument `meanwhile` is called while
rows travel.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from forge_parallel.config import ParallelConfig
from forge_parallel.dispatch_config import DispatcherConfig
from forge_parallel.error import ParallelError
from forge_parallel.match import find
from forge_parallel.mesh import Mesh
from forge_parallel.plan import Plan
from forge_parallel.tensor_roles import Axis, RoleModule, Tokenwise, cut_experts, placed, with_role


@cache
def _cut(names: tuple[str, ...]) -> type[Tokenwise]:
    """Return the role of experts that are cut over ranks; all tp ranks have the same ones."""
    return type("Experts", (Tokenwise,), {"placements": dict.fromkeys(names, Shard(0))})


def _stacked(name: str, layer: nn.Module) -> Any:
    """Return the experts of a layer.

    Raises:
        ParallelError: they are no module of stacked parameters, or the layer does not call a dispatcher.
    """
    experts = getattr(layer, "experts", None)
    if not hasattr(layer, "dispatch") or not isinstance(experts, nn.Module):
        raise ParallelError(f"{name}, a {type(layer).__name__}, has no module `experts` and no `dispatch`")
    if any(True for child in experts.children() for _ in child.parameters()):
        raise ParallelError(f"{name}.experts has parameters in modules of its own; stack them, experts first")
    return experts


def _require(name: str, experts: int, ranks: int, dispatcher: DispatcherConfig) -> None:
    """Check that a layer can be cut and served."""
    if experts % ranks:
        raise ParallelError(
            f"{name} has {experts} experts, which cannot be cut over ep = {ranks} ranks; use a divisor of it"
        )
    try:
        dispatcher.require(ranks, experts)
    except ValueError as error:
        raise ParallelError(f"{name}: {error}") from None


def _places(name: str, experts: nn.Module, tp: DeviceMesh | None, narrow: bool) -> dict[str, list[Placement]]:
    """Return the placements of the parameters of experts over the tp ranks; none without these.

    Raises:
        ParallelError: their width cannot be cut evenly.
    """
    names = [key for key, parameter in experts._parameters.items() if parameter is not None]
    if tp is None:
        return {key: [] for key in names}
    if not narrow:
        return {key: [Replicate()] for key in names}
    for key, placement in (found := placed(f"{name}.experts", experts)):
        shape = tuple(experts._parameters[key].shape)  # type: ignore[union-attr]
        if isinstance(placement, Shard) and shape[placement.dim] % tp.size():
            raise ParallelError(
                f"dim {placement.dim} of {name}.experts.{key} {shape} cannot be cut over tp = {tp.size()} "
                'ranks; make it a multiple, or set tensor_parallel.experts = "whole"'
            )
    return {key: [placement] for key, placement in found}


def _role(places: dict[str, list[Placement]], narrow: bool) -> type[RoleModule]:
    if narrow:
        return cut_experts(tuple((key, one) for key, (one,) in places.items()))
    return _cut(tuple(places))


def expert_parallel(model: nn.Module, plan: Plan, mesh: Mesh, config: ParallelConfig) -> None:
    """Cut the experts of a model over the ranks of `mesh.ep`, in place. Names do not change. Collective.

    Args:
        model: on the meta device, or with equal values on all ranks.
        plan: the flat plan; uses `experts`.
        mesh: the grid of ranks, with `ep`.
        config: uses `expert_parallel` and `tensor_parallel`.

    Raises:
        ParallelError: the plan names no experts, their number cannot be cut evenly, or the dispatcher cannot
            serve so many.
    """
    if not plan.experts and mesh.pipeline.size == 1:
        raise ParallelError(
            f"the plan of {type(model).__name__} names no layers of experts (`experts`); use mesh.ep = 1"
        )
    assert mesh.ep is not None and mesh.experts is not None, "expert parallelism needs its axis"
    dispatch, ranks = config.expert_parallel.build(mesh.ep), mesh.ep.size()
    narrow = mesh.tp is not None and config.tensor_parallel.experts == "cut"
    for name, layer in (item for pattern in plan.experts for item in find(model, pattern).items()):
        experts = _stacked(name, layer)
        places = _places(name, experts, mesh.tp, narrow)
        for key, parameter in experts._parameters.items():
            if parameter is None:
                continue
            _require(name, len(parameter), ranks, config.expert_parallel)
            cut = distribute_tensor(parameter.detach(), mesh.experts, [Shard(0), *places[key]])
            experts._parameters[key] = nn.Parameter(cut, requires_grad=parameter.requires_grad)
        experts.__class__ = with_role(type(experts), _role(places, narrow))
        experts.tensor_axis = None if mesh.tp is None else Axis.of(mesh.tp, config.tensor_parallel.sequence)
        layer.dispatch = dispatch  # type: ignore[assignment]
