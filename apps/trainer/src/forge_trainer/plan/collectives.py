"""Records the network traffic of a rank: each collective by axis, inside a node or between nodes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from forge_trainer.plan.places import Place

KINDS = {
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
}
"""Parts of operation names, and the kind of collective that each stands for."""


INNER_AXES = ("tp", "cp", "ep")
"""Axes along which ranks communicate inside the blocks of a model."""


class Collective(NamedTuple):
    """A kind of collective.

    Attributes:
        axis: axis of the mesh whose ranks participate, or several joined by `+`.
        kind: see `KINDS`.
        ranks: number of participating ranks.
        nodes: number of nodes of these ranks.
        phase: `forward`, `backward` or `update`.
    """

    axis: str
    kind: str
    ranks: int
    nodes: int
    phase: str


class Traffic(NamedTuple):
    """The amount of a kind of collective in a step.

    Attributes:
        count: number of calls.
        bytes: bytes of the full tensor in an all-gather or a reduce-scatter; bytes that this rank sends in
            other kinds.
    """

    count: float
    bytes: float


def is_collective(func: Any) -> bool:
    """Return whether an operation communicates."""
    space, _, name = func._schema.name.partition("::")
    return space in ("c10d", "_c10d_functional") and kind_of(name) is not None


def kind_of(name: str) -> str | None:
    """Return the kind of a collective by its name; None for operations that only wait."""
    return next((kind for part, kind in KINDS.items() if part in name), None)


class Collectives:
    """A record of the collectives of a step.

    Attributes:
        found: traffic by micro-batch and kind.

    Args:
        axes: the axes that each process group serves, by the name of the group.
        node_ranks: number of ranks of a node, which are consecutive.
    """

    def __init__(self, axes: dict[str, list[str]], node_ranks: int) -> None:
        self._axes, self._node_ranks = axes, node_ranks
        self.found: defaultdict[tuple[str, Collective], Traffic] = defaultdict(lambda: Traffic(0, 0))

    def note(self, name: str, arguments: Any, out: Any, place: Place) -> None:
        """Record one call."""
        import torch.distributed as dist

        group = group_of_call(arguments)
        ranks = dist.get_process_group_ranks(group)
        kind = kind_of(name.partition("::")[2])
        assert kind is not None
        collective = Collective(
            self._axis(group.group_name, name.startswith("_") or kind in ("send", "receive")),
            kind,
            len(ranks),
            len({rank // self._node_ranks for rank in ranks}),
            place.phase,
        )
        before = self.found[place.micro, collective]
        self.found[place.micro, collective] = Traffic(
            before.count + 1, before.bytes + size_of(kind, arguments, out)
        )

    def _axis(self, group: str, inside: bool) -> str:
        """Return the axis of a call; of several, functional calls and messages belong to inner axes."""
        names = self._axes.get(group, ["all ranks"])
        inner = [name for name in names if (name in INNER_AXES) == inside]
        return (inner or names)[0]


def group_of_call(arguments: Any) -> Any:
    """Return the process group among the arguments of a collective."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import _resolve_process_group

    for one in arguments:
        if isinstance(one, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(one)
            except (RuntimeError, TypeError):
                continue  # a reduce operation is such an object, too
        if isinstance(one, dist.ProcessGroup):
            return one
    name = [one for one in arguments if isinstance(one, str)][-1]
    return _resolve_process_group(name)  # type: ignore[arg-type]


def size_of(kind: str, arguments: Any, out: Any) -> int:
    """Return the bytes of a collective, see `Traffic`."""
    given = [_bytes(x) for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    made = [_bytes(x) for x in tree_leaves(out) if isinstance(x, Tensor)]
    if kind in ("all-gather", "reduce-scatter"):
        return max([*given, *made])
    if kind == "all-to-all" and len(given) == 2:
        return given[1]  # (output, input, ...)
    return given[0]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def names_of_axes(mesh: Any) -> dict[str, list[str]]:
    """Return the axes that each process group of a mesh serves, by its name; axes of parameters first.

    Args:
        mesh: a `forge_parallel.mesh.Mesh`.
    """
    named: list[tuple[Any, str]] = []
    for grid in (mesh.fsdp, mesh.tp, mesh.ep, mesh.efsdp, mesh.experts):
        if grid is not None:
            named += [(grid.get_group(name), name) for name in grid.mesh_dim_names or ()]
    views = {"pp": mesh.pipeline, "cp": mesh.context, "data": mesh.loss, "stage": mesh.stage}
    named += [(view.group, name) for name, view in {**views, "readers": mesh.batch}.items()]
    found: dict[str, list[str]] = {}
    for group, name in named:
        if group is not None and name not in found.setdefault(group.group_name, []):
            found[group.group_name].append(name)
    return found
