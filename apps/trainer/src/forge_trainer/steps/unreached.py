"""Finds parameters that no gradient reaches: a part of a model without a path to the loss never learns."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from forge_parallel.mesh import Mesh
from forge_parallel.tensor import local_part
from torch import nn

from forge_trainer.console import emit
from forge_trainer.optim.groups import listed


def unreached(parts: Sequence[nn.Module], mesh: Mesh) -> list[str]:
    """List the trained parameters whose gradient is 0 on all ranks. Collective; waits for the device.

    Args:
        parts: parts of the model, after the backward passes of a step.
        mesh: the grid of ranks.
    """
    trained = {name: p for part in parts for name, p in part.named_parameters() if p.requires_grad}
    given = {name: local_part(p.grad) for name, p in trained.items() if p.grad is not None}
    moved = torch.stack([(one != 0).any() for one in given.values()]).tolist() if given else []
    reached = [name for name, is_reached in zip(given, moved, strict=True) if is_reached]
    everyone = [(list(trained), reached)]
    if mesh.control_group is not None:
        everyone = everyone * dist.get_world_size(mesh.control_group)
        dist.all_gather_object(everyone, everyone[0], group=mesh.control_group)
    found = {name for _, names in everyone for name in names}
    names = dict.fromkeys(name for owned, _ in everyone for name in owned)
    return [name for name in names if name not in found]


def tell_unreached(parts: Sequence[nn.Module], mesh: Mesh) -> None:
    """Print the unreached parameters on the first rank. Collective."""
    names = unreached(parts, mesh)
    if names and (mesh.control_group is None or dist.get_rank(mesh.control_group) == 0):
        emit(
            f"no gradient reaches {', '.join(listed(names))} in the first step: they stand behind what is "
            "still 0, serve no token yet, or have no path to the loss\n",
            sys.stderr,
        )
