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
    """2-norm of all gradients together. Collective.

    Each rank adds up the squares of the boxes whose first copy it holds; then one sum over the ranks, the
    same whatever the layouts, so that ranks with other layouts, or without any gradient, cannot miss it.

    Args:
        parameters: plain or sharded, over one mesh or several; those without a gradient count as zero. Of
            the same dtypes on every rank.
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
    """[] each, in float32 at least, on the device of the first; no tensor is widened in memory."""
    if len({tensor.dtype for tensor in tensors}) == len({tensor.device for tensor in tensors}) == 1:
        return capabilities.norms(tensors, torch.promote_types(tensors[0].dtype, torch.float32))
    single = [_norms([tensor])[0].to(tensors[0].device) for tensor in tensors]
    return [norm.to(reduce(torch.promote_types, (one.dtype for one in single))) for norm in single]


@torch.no_grad()
def clip_(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale all gradients in place by min(1, max_norm / norm).

    Args:
        parameters: those of `global_norm`.
        max_norm: what the norm is at most afterwards.
        norm: from `global_norm`.
    """
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        capabilities.scale_(gradients, factor.to(gradients[0].device))
