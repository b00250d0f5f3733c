"""Which part of a tensor this rank holds, for norms, weights and checkpoints. No other module knows it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from forge_parallel import capabilities
from forge_parallel.error import ParallelError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from forge_parallel.mesh import Mesh


_WRAPPED = "_tensor"
"""Where the tensors of torchao that change what FSDP2 gathers keep the values."""


_COPY = "_forge_parallel_copy"
"""The attribute of a parameter that another stage of the pipeline has too, and counts."""


def mark_as_copy(parameter: Tensor) -> None:
    """Mark a parameter as a copy: another stage of the pipeline has the same one, and counts it."""
    setattr(parameter, _COPY, True)


def is_copy(parameter: Tensor) -> bool:
    """Whether another stage of the pipeline has the same parameter, and counts and saves it."""
    return getattr(parameter, _COPY, False)


class LocalShard(NamedTuple):
    """The shard of a tensor that a rank holds.

    Attributes:
        values: the values of the shard, sharing memory with the tensor; may be empty.
        offsets: the start of the shard in the full tensor, one a dim; for an empty shard its end.
        is_first_copy: true on exactly one of the ranks that hold the same shard: this rank counts it in a
            norm and writes it to a checkpoint.
    """

    values: Tensor
    offsets: tuple[int, ...]
    is_first_copy: bool


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; does not import DTensor for it."""
    return hasattr(tensor, "_local_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """Return the values that this rank holds, sharing memory with the tensor.

    For a weight that FSDP2 gathers in 8 bits, the values in high precision.
    """
    tensor = tensor.detach()
    values = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return getattr(values, _WRAPPED, values)


def local_shard(tensor: Tensor, mesh: Mesh | None = None) -> LocalShard:
    """Return the shard of a tensor that this rank holds.

    Args:
        tensor: plain, or a DTensor that is sharded or replicated along any axes of its device mesh, also by
            FSDP2 after tensor parallelism.
        mesh: the grid, which shows copies on ranks outside of the tensor's own mesh: of a plain tensor, or of
            a DTensor on a part of the grid. Without it, such a tensor counts as the first copy.

    Raises:
        ParallelError: the values are partial sums, or no contiguous box of the tensor.
    """
    values = local_part(tensor)
    if not is_dtensor(tensor):
        return LocalShard(values, (0,) * tensor.ndim, is_first_copy(tensor, mesh))
    box = _box_of(tensor)
    if box.extents != tuple(values.shape):
        raise ParallelError(
            f"a tensor of shape {tuple(tensor.shape)} placed as {tensor.placements} holds "  # type: ignore[attr-defined]
            f"{tuple(values.shape)} here where {box.extents} was expected; it was not cut by chunks, which "
            "is all that is supported"
        )
    return LocalShard(values, box.offsets, is_first_copy(tensor, mesh))


def is_first_copy(tensor: Tensor, mesh: Mesh | None = None) -> bool:
    """See `LocalShard.is_first_copy`; raises as `local_shard`, but for values of another shape."""
    if is_copy(tensor):
        return False
    if not is_dtensor(tensor):
        return mesh is None or mesh.stage.first
    box = _box_of(tensor)
    if mesh is None or mesh.stage.group is None or not box.is_first:
        return box.is_first
    import torch.distributed as dist

    return dist.get_global_rank(mesh.stage.group, 0) in _ranks(tensor.device_mesh)  # type: ignore[attr-defined]


class _Box(NamedTuple):
    """The shard of all tensors of one shape and placement on a rank."""

    offsets: tuple[int, ...]
    extents: tuple[int, ...]
    is_first: bool


def _box_of(tensor: Any) -> _Box:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ParallelError(f"this rank is not in {mesh}, which the tensor is on; ask only its ranks")
    return _box(tuple(mesh.shape), tuple(coordinate), tuple(tensor.placements), tuple(tensor.shape))


@lru_cache(maxsize=4096)
def _box(
    sizes: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...], shape: tuple[int, ...]
) -> _Box:
    """Return the shard of a rank; cached, because every step asks for it and it is slow to find."""
    if any(placement.is_partial() for placement in placements):
        raise ParallelError(
            f"a tensor of shape {shape} is placed as {placements}: a partial sum, of which no "
            "rank holds a part; reduce it first, say by redistribute(placements=[Replicate()])"
        )
    boxes = [
        _interval(length, _cuts(placements, sizes, dim), sizes, coordinate)
        for dim, length in enumerate(shape)
    ]
    first = all(coordinate[axis] == 0 for axis, one in enumerate(placements) if one.is_replicate())
    return _Box(tuple(start for start, _ in boxes), tuple(length for _, length in boxes), first)


@lru_cache(maxsize=64)
def _ranks(device_mesh: DeviceMesh) -> frozenset[int]:
    return frozenset(device_mesh.mesh.flatten().tolist())


def _cuts(placements: Any, sizes: Sequence[int], dim: int) -> list[int]:
    """Return the mesh axes that shard a dim, in the order in which they do.

    Left to right, except for a strided shard, which FSDP2 makes of a dim that tensor parallelism has sharded:
    it shards after axes to its right, as many as multiply to its split factor.
    """
    order: list[int] = []
    for axis in reversed(range(len(placements))):
        if not capabilities.cuts(placements[axis], dim):
            continue
        missing, position = capabilities.split_factor(placements[axis]), 0
        while missing > 1 and position < len(order):
            missing, rest = divmod(missing, sizes[order[position]])
            missing = 0 if rest else missing
            position += 1
        if missing != 1:
            raise ParallelError(
                f"dim {dim} is placed as {tuple(placements)} on a mesh of {tuple(sizes)}: rows that are not "
                "next to each other, which is no box; redistribute it to Shard first"
            )
        order.insert(position, axis)
    return order


def _interval(
    length: int, cuts: list[int], sizes: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, int]:
    """Return start and length of the rest of a dim after cutting it into chunks, axis after axis."""
    start = 0
    for axis in cuts:
        chunk = -(-length // sizes[axis])
        low = min(chunk * coordinate[axis], length)
        start, length = start + low, min(chunk, length - low)
    return start, length
