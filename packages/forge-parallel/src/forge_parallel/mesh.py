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

EFSDP = "efsdp"
"""The axis over which it shards experts: `fsdp` over `ep`."""

FSDP = "fsdp"
"""The axis over which FSDP2 shards: `dp_shard` times `cp`, for ranks that see other tokens of one sequence
need the same parameters."""


@dataclass(frozen=True)
class View:
    """The ranks along one or several axes of the grid, seen from this rank.

    Attributes:
        rank: index of this process among them.
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
    """The grid of ranks. `Mesh(device)` is the grid of a lone process.

    Attributes:
        device: the device that this rank computes on.
        batch: the ranks that read different data; `batch.rank` is the part of a global batch that this rank
            reads.
        loss: the ranks that see different tokens, over which losses are summed.
        stage: the ranks that hold the same part of the model, with every copy and every shard of each of its
            parameters. All ranks, if there is no pipeline.
        pipeline: the stages of the pipeline, in order.
        context: the ranks that see different tokens of the same sequences.
        fsdp: the ranks that FSDP2 shards over, (replicate, shard) under HSDP; None in a lone process without
            a group.
        tp: the ranks that share each matrix; None when there is one.
        ep: the ranks that share the experts of a layer; None when there is one.
        experts: the ranks of `ep` and `tp`, over which experts are laid out.
        efsdp: the ranks that FSDP2 shards experts over, (replicate, shard) under HSDP.
        control_group: a separate CPU group for decisions and checkpoints, so that they neither block the
            collectives of training nor wait for them; None in a lone process.
    """

    device: torch.device
    batch: View = View()
    loss: View = View()
    stage: View = View()
    pipeline: View = View()
    context: View = View()
    fsdp: DeviceMesh | None = None
    tp: DeviceMesh | None = None
    ep: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    efsdp: DeviceMesh | None = None
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
    from torch.distributed.device_mesh import init_device_mesh

    def grid(sizes: dict[str, int]) -> DeviceMesh:
        axes = {name: size for name, size in sizes.items() if size > 1 or name in (FSDP, EFSDP)}
        made = init_device_mesh(env.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        return capabilities.be_patient(made)

    # Two views of the same ranks: by what they hold of the model, and by what they read.
    shards = sizes["dp_shard"] * sizes["cp"]
    shard_grid = grid(
        {"pp": sizes["pp"], "dp_replicate": sizes["dp_replicate"], FSDP: shards, "tp": sizes["tp"]}
    )
    read = grid(sizes) if sizes["cp"] > 1 else shard_grid
    layout = {"pp": sizes["pp"], "dp_replicate": sizes["dp_replicate"], EFSDP: shards // config.ep}
    spread = grid(layout | {"ep": config.ep, "tp": sizes["tp"]}) if config.ep > 1 else None
    return Mesh(
        env.device,
        batch=_view(read, DATA_AXES if read is not shard_grid else ("dp_replicate", FSDP)),
        loss=_view(shard_grid, ("dp_replicate", FSDP)),
        stage=_view(shard_grid, ("dp_replicate", FSDP, "tp")),
        pipeline=_view(shard_grid, ("pp",)),
        context=_view(read, ("cp",)),
        fsdp=_part(shard_grid, ("dp_replicate", FSDP)),
        tp=_part(shard_grid, ("tp",)),
        ep=spread and _part(spread, ("ep",)),
        experts=spread and _part(spread, ("ep", "tp")),
        efsdp=spread and _part(spread, ("dp_replicate", EFSDP)),
        control_group=capabilities.host_group(),
    )


def _part(grid: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh | None:
    """Return the part of the grid along those of the axes that have more than one rank; None if none has."""
    names = tuple(axis for axis in axes if axis in (grid.mesh_dim_names or ()))
    return grid[names] if names else None


def _view(grid: DeviceMesh, axes: tuple[str, ...]) -> View:
    """Return the ranks along some axes of the grid."""
    part = _part(grid, axes)
    if part is None:
        return View()
    names = part.mesh_dim_names or ()
    along = part if len(names) == 1 else capabilities.be_patient(capabilities.flatten(part, "_".join(names)))
    return View(along.get_local_rank(), along.size(), along.get_group())
