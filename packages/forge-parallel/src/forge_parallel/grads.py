"""The norm of all gradients over all ranks, and clipping by it, without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor

from forge_parallel import capabilities
from forge_parallel.mesh import Mesh
from forge_parallel.tensor import is_copy, is_first_copy, local_part


@torch.no_grad()
def global_norm(parameters: Iterable[Tensor], mesh: Mesh) -> Tensor:
    """Return the 2-norm of all gradients together. Collective.

    Each rank adds up the squares of those shards of which it holds the first copy; one sum over the ranks
    follows. It runs whatever the layouts, so that ranks without a gradient take part.

    Args:
        parameters: plain or sharded, over one mesh or several; a missing gradient counts as zero. Every rank
            has the same dtypes.
        mesh: the grid of ranks.

    Returns:
        [] float32 (float64 if a parameter is), equal on every rank.

    Raises:
        ParallelError: a gradient is a partial sum.
    """
    parameters = list(parameters)
    dtype = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
    counted = [
        local_part(p.grad)
        for p in parameters
        if p.grad is not None and not is_copy(p) and is_first_copy(p.grad, mesh)
    ]
    if counted:
        square = torch.linalg.vector_norm(torch.stack(_norms(counted))).square().to(dtype)
    else:
        square = torch.zeros((), dtype=dtype, device=mesh.device)
    return mesh.pipeline.sum_(mesh.stage.sum_(square.to(mesh.device))).sqrt()


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the norms, each [] in at least float32, on the first device; widens no tensor in memory."""
    if len({tensor.dtype for tensor in tensors}) == len({tensor.device for tensor in tensors}) == 1:
        return capabilities.norms(tensors, torch.promote_types(tensors[0].dtype, torch.float32))
    single = [_norms([tensor])[0].to(tensors[0].device) for tensor in tensors]
    return [norm.to(reduce(torch.promote_types, (one.dtype for one in single))) for norm in single]


@torch.no_grad()
def clip_(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale all gradients in place by min(1, max_norm / norm).

    Args:
        parameters: the parameters given to `global_norm`.
        max_norm: upper bound of the norm afterwards.
        norm: from `global_norm`.
    """
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        capabilities.scale_(gradients, factor.to(gradients[0].device))
