"""Which part of a tensor this rank holds: the only place that knows, for norms, weights and checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from forge_parallel import capabilities
from forge_parallel.error import ParallelError

if TYPE_CHECKING:
    from forge_parallel.mesh import Mesh


_WRAPPED = "_tensor"
"""Where the tensors of torchao that change what FSDP2 gathers keep the values."""


class LocalShard(NamedTuple):
    """The box of a tensor that a rank holds.

    Attributes:
        values: what is held, sharing memory with the tensor; may be empty.
        offsets: where in the full tensor it starts, one a dim; for an empty shard its end.
        is_first_copy: of all ranks that hold the same box, exactly one says yes: the one that counts it in a
            norm and writes it to a checkpoint.
    """

    values: Tensor
    offsets: tuple[int, ...]
    is_first_copy: bool


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; does not import DTensor for it."""
    return hasattr(tensor, "_local_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """The values that this rank holds, sharing memory with the tensor.

    Of a weight that FSDP2 gathers in 8 bits, those in high precision.
    """
    tensor = tensor.detach()
    values = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return getattr(values, _WRAPPED, values)


def local_shard(tensor: Tensor, mesh: Mesh | None = None) -> LocalShard:
    """Which part of a tensor this rank holds.

    Args:
        tensor: plain, or a DTensor that is cut or copied along any axes of its device mesh, also by FSDP2
            after tensor parallelism.
        mesh: the grid, to tell copies on ranks that the tensor does not know of: those of a plain tensor, or
            of a DTensor on a part of the grid. Without it, such a tensor counts as the first copy.

    Raises:
        ParallelError: the values are partial sums, or no box of the tensor.
    """
    values = local_part(tensor)
    if not is_dtensor(tensor):
        return LocalShard(values, (0,) * tensor.ndim, mesh is None or mesh.stage.first)
    device_mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    coordinate = device_mesh.get_coordinate()
    if coordinate is None:
        raise ParallelError(f"this rank is not in {device_mesh}, which the tensor is on; ask only its ranks")
    if any(placement.is_partial() for placement in placements):
        raise ParallelError(
            f"a tensor of shape {tuple(tensor.shape)} is placed as {placements}: a partial sum, of which no "
            "rank holds a part; reduce it first, say by redistribute(placements=[Replicate()])"
        )
    sizes = [device_mesh.size(axis) for axis in range(device_mesh.ndim)]
    boxes = [
        _interval(tensor.shape[dim], _cuts(placements, sizes, dim), sizes, coordinate)
        for dim in range(tensor.ndim)
    ]
    offsets, shape = tuple(start for start, _ in boxes), tuple(length for _, length in boxes)
    if shape != tuple(values.shape):
        raise ParallelError(
            f"a tensor of shape {tuple(tensor.shape)} placed as {placements} holds {tuple(values.shape)} "
            f"here where {shape} was expected; it was not cut by chunks, which is all that is supported"
        )
    copied = [axis for axis, placement in enumerate(placements) if placement.is_replicate()]
    first = all(coordinate[axis] == 0 for axis in copied) and (mesh is None or _has_first(mesh, device_mesh))
    return LocalShard(values, offsets, first)


def _cuts(placements: Any, sizes: list[int], dim: int) -> list[int]:
    """The mesh axes that cut a dim, in the order in which they cut it.

    Left to right, but for a strided shard, which FSDP2 makes of what tensor parallelism has cut already: it
    cuts after axes to its right, as many as multiply to its split factor.
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


def _interval(length: int, cuts: list[int], sizes: list[int], coordinate: list[int]) -> tuple[int, int]:
    """Start and length of what is left of a dim after cutting it into chunks, axis after axis."""
    start = 0
    for axis in cuts:
        chunk = -(-length // sizes[axis])
        low = min(chunk * coordinate[axis], length)
        start, length = start + low, min(chunk, length - low)
    return start, length


def _has_first(mesh: Mesh, device_mesh: Any) -> bool:
    """Whether a device mesh, maybe one of several that hold the same, has the first rank of the stage."""
    if mesh.stage.group is None:
        return True
    import torch.distributed as dist

    return dist.get_global_rank(mesh.stage.group, 0) in device_mesh.mesh.flatten().tolist()
