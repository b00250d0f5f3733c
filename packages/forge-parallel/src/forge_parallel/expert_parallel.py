"""Expert parallelism: each rank has some of the experts of a layer, and tokens travel to them and back.

A layer of experts is any module with these attributes: `experts`, a module whose parameters all have the
number of experts as their first dim, called with (rows, ends); and `dispatch`, called with (experts, rows,
ends) in its place, which is replaced here. R rows, D dim, E experts of all ranks, L experts of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from forge_parallel.error import ParallelError
from forge_parallel.match import find
from forge_parallel.mesh import Mesh
from forge_parallel.plan import Plan
from forge_parallel.tensor_parallel import Axis, Tokenwise, with_role


@dataclass(frozen=True)
class AllToAll:
    """Sends rows to the ranks that have their experts, and what these make of them back.

    Nothing is padded and nothing is dropped. Ranks tell each other how many rows come, which the host has to
    know. An expert, or a rank, may have none.

    Attributes:
        group: the ranks that share the experts, in the order of the experts.
        ranks: how many they are.
    """

    group: ProcessGroup
    ranks: int

    def __call__(self, experts: Callable[[Tensor, Tensor], Tensor], rows: Tensor, ends: Tensor) -> Tensor:
        """[R, D] -> [R, D]. Collective.

        Args:
            experts: of this rank: ([rows, D], [L] ends) -> [rows, D].
            rows: those of the first expert first; rows after the last end are not sent.
            ends: [E] int32, where the rows of each expert end.
        """
        sent = torch.diff(ends, prepend=ends.new_zeros(1)).view(self.ranks, -1)
        received = _swapped(sent, None, None, self.group)
        to, of = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        arrived = _Exchange.apply(rows[: sum(to)], to, of, self.group)
        # from the order of (rank, expert) to that of (expert, rank)
        local = torch.arange(sent.shape[1], device=rows.device).repeat(self.ranks)
        order = local.repeat_interleave(received.flatten(), output_size=sum(of)).sort(stable=True).indices
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=rows.device)
        made = experts(arrived[order], received.sum(0).cumsum(0).to(ends.dtype))
        back = _Exchange.apply(made[inverse], of, to, self.group)
        return back if len(back) == len(rows) else torch.cat([back, rows[len(back) :]])


class _Exchange(torch.autograd.Function):
    """Rows to other ranks; their gradients go back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, to: list[int], of: list[int], group: ProcessGroup) -> Tensor:
        ctx.to, ctx.of, ctx.group = to, of, group
        return _swapped(rows, of, to, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _swapped(gradient, ctx.to, ctx.of, ctx.group), None, None, None


def _swapped(x: Tensor, of: list[int] | None, to: list[int] | None, group: ProcessGroup) -> Tensor:
    return functional.wait_tensor(functional.all_to_all_single(x.contiguous(), of, to, group))


@cache
def _cut(names: tuple[str, ...]) -> type[Tokenwise]:
    """The role of experts of which each rank has some, and all tp ranks the same."""
    return type("Experts", (Tokenwise,), {"placements": dict.fromkeys(names, Shard(0))})


def _stacked(name: str, layer: nn.Module) -> Any:
    """The experts of a layer.

    Raises:
        ParallelError: they are no module of stacked parameters, or the layer does not call a dispatcher.
    """
    experts = getattr(layer, "experts", None)
    if not hasattr(layer, "dispatch") or not isinstance(experts, nn.Module):
        raise ParallelError(f"{name}, a {type(layer).__name__}, has no module `experts` and no `dispatch`")
    if any(True for child in experts.children() for _ in child.parameters()):
        raise ParallelError(f"{name}.experts has parameters in modules of its own; stack them, experts first")
    return experts


def expert_parallel(model: nn.Module, plan: Plan, mesh: Mesh, sequence: bool) -> None:
    """Cut the experts of a model over the ranks of `mesh.ep`, in place. Names do not change. Collective.

    Args:
        model: on the meta device, or with equal values on all ranks.
        plan: `experts` is used.
        mesh: with `ep`.
        sequence: whether tensor parallelism cuts the residual stream over the tokens.

    Raises:
        ParallelError: the plan names no experts, or their number cannot be cut evenly.
    """
    if not plan.experts and mesh.pipeline.size == 1:
        raise ParallelError(
            f"the plan of {type(model).__name__} names no layers of experts (`experts`); use mesh.ep = 1"
        )
    assert mesh.ep is not None and mesh.experts is not None, "expert parallelism needs its axis"
    dispatch = AllToAll(mesh.ep.get_group(), mesh.ep.size())
    placements = [Shard(0), *(Replicate() for _ in range(mesh.experts.ndim - 1))]
    for name, layer in (item for pattern in plan.experts for item in find(model, pattern).items()):
        experts = _stacked(name, layer)
        for key, parameter in experts._parameters.items():
            if parameter is None:
                continue
            if len(parameter) % dispatch.ranks:
                raise ParallelError(
                    f"{name} has {len(parameter)} experts, which cannot be cut over ep = {dispatch.ranks} "
                    "ranks; use a divisor of it"
                )
            cut = distribute_tensor(parameter.detach(), mesh.experts, placements)
            experts._parameters[key] = nn.Parameter(cut, requires_grad=parameter.requires_grad)
        names = tuple(key for key, parameter in experts._parameters.items() if parameter is not None)
        experts.__class__ = with_role(type(experts), _cut(names))
        experts.tensor_axis = None if mesh.tp is None else Axis.of(mesh.tp, sequence)
        layer.dispatch = dispatch  # type: ignore[assignment]
