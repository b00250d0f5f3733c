"""Which part of a parameter this rank holds."""

from __future__ import annotations

from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is sharded; does not import DTensor for it."""
    return type(tensor).__name__ == "DTensor" or hasattr(tensor, "_local_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """The values that this rank holds, sharing memory with the tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def local_chunk(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The local values and where in the whole tensor they start; for empty shards that is its end."""
    if not is_dtensor(tensor):
        return tensor.detach(), (0,) * tensor.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
    )
    return local_part(tensor), tuple(offsets)
