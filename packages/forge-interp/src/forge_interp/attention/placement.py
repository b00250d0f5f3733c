"""Which sequences and heads of an attention call does this rank hold, where it was given DTensors?"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forge_interp.errors import InterpError


def is_dtensor(x: Any) -> bool:
    """Whether it is a DTensor; imports nothing that is not imported yet."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local_parts(tensors: Mapping[str, Any], mask: Any) -> dict[str, Any]:
    """This rank's part of the tensors of a call by name, DTensors [B, N, T, H] or [N, T, H], and of its mask.

    Raises InterpError: they are not placed alike, or tokens or head dims are spread over ranks.
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
    """[B, K, S, H], keys or values [B, K times, S, H] before each head was repeated; DTensors stay split."""
    if is_dtensor(x):
        shards = [i for i, p in enumerate(x.placements) if p.is_shard(1)]
        if x.shape[1] // times % math.prod(x.device_mesh.size(i) for i in shards) == 0:
            return x.unflatten(1, (-1, times))[:, :, 0]  # a slice with a step would gather the heads
    return x[:, ::times]


def placed_like(value: Tensor, query: Any) -> Tensor:
    """This rank's [B, N, T] or [B, N, T, S] as the DTensor whose sequences and heads are split as q's are."""
    rows = query.dim() - 1
    return joined(value, query.device_mesh, query.placements, (*query.shape[:rows], *value.shape[rows:]))


def joined(value: Tensor, mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> Any:
    """The DTensor of a full shape, of which this rank holds `value`."""
    from torch.distributed.tensor import DTensor

    strides = torch.empty(shape, device="meta").stride()
    full = {"shape": torch.Size(shape), "stride": strides}
    return DTensor.from_local(value, mesh, placements, run_check=False, **full)
