"""Which sequences and heads of an attention call with DTensors does this rank hold?"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forge_interp.errors import InterpError


def is_dtensor(x: Any) -> bool:
    """Whether `x` is a DTensor; imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local_parts(tensors: Mapping[str, Any], mask: Any) -> dict[str, Any]:
    """Return this rank's part of the tensors of a call, DTensors [B, N, T, H] or [N, T, H], and of its mask.

    InterpError: the tensors are not placed alike, or tokens or head dims are split over ranks.
    """
    query = tensors["query"]
    if not all(is_dtensor(x) and x.placements == query.placements for x in tensors.values()) or any(
        p.is_partial() or (p.is_shard() and p.dim >= query.dim() - 2) for p in query.placements
    ):
        placed = ", ".join(f"{name} {getattr(x, 'placements', 'whole')}" for name, x in tensors.items())
        raise InterpError(
            f"attention was called with DTensors: {placed}; expected all placed alike, split by sequences "
            "and heads at most: capture attn.q, attn.k, attn.v or attn.z, which are gathered"
        )
    if is_dtensor(mask):
        from torch.distributed.tensor import Replicate, Shard

        missing = query.dim() - mask.dim()
        dims = [p.dim - missing if p.is_shard() else -1 for p in query.placements]
        is_split = [dim >= 0 and mask.shape[dim] > 1 for dim in dims]
        split = [Shard(dim) if here else Replicate() for dim, here in zip(dims, is_split, strict=True)]
        mask = mask.redistribute(placements=split).to_local()
    return {name: x.to_local() for name, x in tensors.items()} | {"mask": mask}


def unrepeated(x: Any, times: int) -> Any:
    """Undo a repetition of heads: keys or values [B, K times, S, H] to [B, K, S, H]; DTensors stay split."""
    if is_dtensor(x):
        shards = [i for i, p in enumerate(x.placements) if p.is_shard(1)]
        if x.shape[1] // times % math.prod(x.device_mesh.size(i) for i in shards) == 0:
            return x.unflatten(1, (-1, times))[:, :, 0]  # a slice with a step would gather the heads
    return x[:, ::times]


def placed_like(value: Tensor, query: Any) -> Tensor:
    """Make a DTensor of this rank's [B, N, T] or [B, N, T, S]; sequences and heads split as in `query`."""
    rows = query.dim() - 1
    return joined(value, query.device_mesh, query.placements, (*query.shape[:rows], *value.shape[rows:]))


def joined(value: Tensor, mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> Any:
    """Return the DTensor of a full shape whose part on this rank is `value`."""
    from torch.distributed.tensor import DTensor

    strides = torch.empty(shape, device="meta").stride()
    full = {"shape": torch.Size(shape), "stride": strides}
    return DTensor.from_local(value, mesh, placements, run_check=False, **full)
