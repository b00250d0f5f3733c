"""Over which ranks a collective goes, by its process group."""

from __future__ import annotations

from collections.abc import Callable

from forge_parallel.mesh import Mesh
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

DECISIONS = "decisions (CPU)"
"""The group by which ranks decide together, and the span in which they do."""

DECIDING = "agree"
UNKNOWN = "an unknown axis"


def axis_of(mesh: Mesh, sizes: dict[str, int]) -> Callable[[str, str], str]:
    """From the name of a process group, if the trace has it, and the span of the clock, to an axis.

    gloo tells no group; where one axis alone has several ranks, it is that one.

    Args:
        mesh: the grid of ranks.
        sizes: of its axes.
    """
    names = _named(mesh)
    several = [axis for axis, size in sizes.items() if size > 1]
    only = several[0] if len(several) == 1 else UNKNOWN

    def found(group: str, span: str) -> str:
        if span == DECIDING:
            return DECISIONS
        return names.get(group, group or only) if group else only

    return found


def _named(mesh: Mesh) -> dict[str, str]:
    """From the names of process groups to axes; a group of several axes has the name of the narrowest."""
    found: dict[str, str] = {}

    def add(group: ProcessGroup | None, axis: str) -> None:
        if group is not None:
            found.setdefault(group.group_name, axis)

    for grid in (mesh.tp, mesh.ep, mesh.fsdp, mesh.efsdp, mesh.experts):
        for axis in _axes(grid):
            assert grid is not None
            add(grid.get_group(axis), axis)
    add(mesh.context.group, "cp")
    add(mesh.pipeline.group, "pp")
    add(mesh.loss.group, "dp (losses)")
    add(mesh.batch.group, "dp (batches)")
    add(mesh.stage.group, "all that hold the same part (norms)")
    add(mesh.control_group, DECISIONS)
    return found


def _axes(grid: DeviceMesh | None) -> tuple[str, ...]:
    return () if grid is None else tuple(grid.mesh_dim_names or ())
