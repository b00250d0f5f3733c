"""The ranks as a grid, and the sums over it that a training step needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_parallel.config import MeshConfig
from forge_parallel.env import Env

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Mesh:
    """The grid of ranks.

    Attributes:
        dp_rank: which part of each global batch is this rank's.
        dp_size: into how many parts a global batch is cut.
        device_mesh: what FSDP2 shards over; None in a lone process without a group.
        control_group: a CPU group of its own for decisions and checkpoints, so that they never wait for, or
            block, the collectives of training; None in a lone process.
    """

    dp_rank: int = 0
    dp_size: int = 1
    device_mesh: DeviceMesh | None = None
    control_group: ProcessGroup | None = None

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over all data ranks, in place. Collective."""
        if self.dp_size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor)
        return tensor


def build_mesh(config: MeshConfig, env: Env) -> Mesh:
    """Lay out the ranks. Collective.

    Raises:
        ParallelError: the axes do not multiply to the number of ranks.
    """
    sizes = config.sizes(env.world_size)
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return Mesh()
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    axes = [axis for axis in sizes if axis == "dp_shard" or sizes[axis] > 1]
    device_mesh = init_device_mesh(env.device.type, tuple(sizes[a] for a in axes), mesh_dim_names=tuple(axes))
    control_group = dist.new_group(backend="gloo")
    assert isinstance(control_group, dist.ProcessGroup), "every rank is a member"
    return Mesh(env.rank, env.world_size, device_mesh, control_group)
