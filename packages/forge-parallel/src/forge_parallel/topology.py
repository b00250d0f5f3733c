"""Which ranks are on one node, and whether the required axes of the mesh stay within nodes."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from forge_parallel.error import ParallelError
from forge_parallel.mesh import Mesh


def require_within_node(mesh: Mesh, axes: Sequence[str], node: str | None = None) -> None:
    """Check that the ranks along each of the axes are on one node. Collective.

    Args:
        mesh: the grid of ranks.
        axes: some of `tp`, `cp`, `ep` and `fsdp`.
        node: the name of this rank's node; None asks the system.

    Raises:
        ParallelError: on every rank, if some are not.
    """
    import torch.distributed as dist

    if not axes or mesh.control_group is None:
        return
    nodes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, node or socket.gethostname(), group=mesh.control_group)
    problems = [problem for axis in axes if (problem := _spread(axis, _group(mesh, axis), nodes))]
    everyone: list[Any] = [None] * len(nodes)
    dist.all_gather_object(everyone, problems, group=mesh.control_group)
    if found := next((problem for one in everyone for problem in one), None):
        raise ParallelError(
            f"{found}, and process_group.within_node wants them on one; start the ranks node by node "
            "(srun --distribution=block), make the axis a divisor of the ranks of a node, or leave it out"
        )


def _group(mesh: Mesh, axis: str) -> Any:
    """Return the process group of an axis; None where it has one rank."""
    if axis == "cp":
        return mesh.context.group
    grid = {"tp": mesh.tp, "ep": mesh.ep, "fsdp": mesh.fsdp}[axis]
    return None if grid is None else grid.get_group(grid.ndim - 1)


def _spread(axis: str, group: Any, nodes: Sequence[str]) -> str | None:
    import torch.distributed as dist

    ranks = [] if group is None else dist.get_process_group_ranks(group)
    where = list(dict.fromkeys(nodes[rank] for rank in ranks))
    if len(where) < 2:
        return None
    return f"the ranks {', '.join(map(str, ranks))} of the axis {axis} are on the nodes {', '.join(where)}"
