"""Finds the axis of a collective from its process group."""

from __future__ import annotations

from collections.abc import Callable

from forge_parallel.mesh import Mesh
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

DECISIONS = "decisions (CPU)"
"""The name of the group for decisions of all ranks; `DECIDING` is the clock span of decisions."""

DECIDING = "agree"
UNKNOWN = "an unknown axis"


def axis_of(mesh: Mesh, sizes: dict[str, int]) -> Callable[[str, str], str]:
    """Return a function from the name of a process group (or "") and the clock span to an axis.

    Events of gloo have no name; if only one axis has several ranks, the collective is on that axis.

    Args:
        mesh: the grid of ranks.
        sizes: sizes of its axes.
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
    """Map names of process groups to axes; a group of several axes gets the narrowest one."""
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
