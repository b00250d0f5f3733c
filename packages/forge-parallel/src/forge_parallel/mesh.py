"""The ranks as a grid of named axes, and the views of it that training needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_parallel import capabilities
from forge_parallel.config import MeshConfig
from forge_parallel.env import Env
from forge_parallel.error import ParallelError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

DATA_AXES = ("dp_replicate", "dp_shard")
"""The axes along which ranks read different data."""


@dataclass(frozen=True)
class View:
    """The ranks along one or several axes of the grid, seen from one of them.

    Attributes:
        rank: of this process among them.
        size: number of ranks.
        group: their process group; None when there is only this rank.
    """

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """Whether this process is the first of them."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks of the view, in place; nothing happens when there is one. Collective."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor, group=self.group)
        return tensor


@dataclass(frozen=True)
class Mesh:
    """The grid of ranks. `Mesh(device)` is that of a lone process.

    Attributes:
        device: what this rank computes on.
        batch: the ranks that read different data; its rank says which part of a global batch is read here.
        loss: the ranks over which losses and counts of targets are summed.
        stage: the ranks that hold the same part of the model: every copy and every shard of a parameter is
            among them. All ranks, as long as there is no pipeline.
        fsdp: what FSDP2 shards over, (replicate, shard) under HSDP; None in a lone process without a group.
        tp: the ranks that share each matrix; None when there is one.
        control_group: a CPU group of its own for decisions and checkpoints, so that they never wait for, or
            block, the collectives of training; None in a lone process.
    """

    device: torch.device
    batch: View = View()
    loss: View = View()
    stage: View = View()
    fsdp: DeviceMesh | None = None
    tp: DeviceMesh | None = None
    control_group: ProcessGroup | None = None


def build_mesh(config: MeshConfig, env: Env) -> Mesh:
    """Lay out the ranks. Collective.

    Raises:
        ParallelError: the axes do not multiply to the number of ranks; or there are several ranks and no
            process group.
    """
    sizes = config.sizes(env.world_size)
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        if env.world_size > 1:
            raise ParallelError(
                f"{env.world_size} ranks and no process group, so each would train alone; "
                "call build_mesh inside `with process_group(env)`"
            )
        return Mesh(env.device)
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    axes = [axis for axis in sizes if axis == "dp_shard" or sizes[axis] > 1]
    grid = init_device_mesh(env.device.type, tuple(sizes[a] for a in axes), mesh_dim_names=tuple(axes))
    data = _view(grid, DATA_AXES)
    stage = _view(grid, tuple(axes))
    fsdp = grid[tuple(axis for axis in DATA_AXES if axis in axes)]
    tp = grid["tp"] if sizes["tp"] > 1 else None
    control_group = dist.new_group(backend="gloo")
    assert isinstance(control_group, dist.ProcessGroup), "every rank is a member"
    return Mesh(env.device, data, data, stage, fsdp, tp, control_group)


def _view(grid: DeviceMesh, axes: tuple[str, ...]) -> View:
    """The ranks along some axes of the grid; axes of size 1 are not in it."""
    names = tuple(axis for axis in axes if axis in (grid.mesh_dim_names or ()))
    along = grid[names[0]] if len(names) == 1 else capabilities.flatten(grid[names], "_".join(names))
    return View(along.get_local_rank(), along.size(), along.get_group())
