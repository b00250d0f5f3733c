"""Which box of each tensor this rank writes, and how boxes are put together again under another layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor

from forge_ckpt.error import CheckpointError
from forge_ckpt.manifest import Chunk, Entry, Manifest, read_chunk

ALIGNMENT = 64

Described = Mapping[str, Entry]
"""Tensors of a checkpoint by name."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; does not import DTensor for it."""
    return hasattr(tensor, "device_mesh")


def box(tensor: Any) -> tuple[Tensor, tuple[int, ...]]:
    """The local values of a tensor and where in the whole they start."""
    if not is_sharded(tensor):
        return tensor.detach(), (0,) * tensor.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.detach().to_local(), tuple(start)


def writes(tensor: Any, rank: int) -> bool:
    """Whether this rank writes its box: of several ranks with the same box only the first does."""
    if not is_sharded(tensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    copies = (place for place, at in zip(tensor.placements, coordinate, strict=True) if at > 0)
    return all(place.is_shard() for place in copies)


def write_boxes(file: BinaryIO, name: str, tensors: Mapping[str, Tensor], rank: int) -> dict[str, Entry]:
    """Write this rank's boxes into one file, one after the other, aligned.

    Returns:
        Each tensor with the chunk written here, or with none.
    """
    entries: dict[str, Entry] = {}
    for key, tensor in tensors.items():
        local, start = box(tensor)
        chunks = []
        if local.numel() and writes(tensor, rank):
            offset = file.tell() + -file.tell() % ALIGNMENT
            file.write(b"\0" * (offset - file.tell()))
            data = local.cpu().contiguous().flatten().view(torch.uint8).numpy().data
            file.write(data)
            digest = xxhash.xxh3_128_hexdigest(data)
            place = {"file": name, "offset": offset, "num_bytes": len(data), "digest": digest}
            chunks.append(Chunk(start=list(start), shape=list(local.shape), **place))
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries[key] = Entry(dtype=dtype, shape=list(tensor.shape), chunks=chunks)
    return entries


def require_fit(manifest: Manifest, targets: Mapping[str, Tensor]) -> None:
    """See that a checkpoint holds exactly the tensors that are wanted, in shape and dtype.

    Raises:
        CheckpointError: lists every name that does not fit.
    """
    wrong = [f"{key} is not in the checkpoint" for key in targets.keys() - manifest.tensors.keys()]
    wrong += [f"{key} is not wanted" for key in manifest.tensors.keys() - targets.keys()]
    for key in targets.keys() & manifest.tensors.keys():
        entry, target = manifest.tensors[key], targets[key]
        have = f"{entry.dtype} {entry.shape}"
        want = f"{str(target.dtype).removeprefix('torch.')} {list(target.shape)}"
        if have != want:
            wrong.append(f"{key} is {have}, wanted {want}")
    if wrong:
        shown = "\n".join(f"  {line}" for line in sorted(wrong)[:20])
        raise CheckpointError(
            f"step {manifest.step} does not fit this model and optimizer ({len(wrong)}):\n{shown}"
        )


def stage(folder: Path, manifest: Manifest, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the local box of each target from disk, verified, without touching the target.

    Raises:
        DamagedError: bytes that are needed are not those that were written.
    """
    return {key: _assemble(folder, manifest.tensors[key], target) for key, target in targets.items()}


def _assemble(folder: Path, entry: Entry, target: Tensor) -> Tensor:
    local, start = box(target)
    staged = torch.empty(local.shape, dtype=local.dtype)
    stop = [a + n for a, n in zip(start, local.shape, strict=True)]
    for chunk in entry.chunks:
        low = [max(a, b) for a, b in zip(start, chunk.start, strict=True)]
        high = [min(a, b + n) for a, b, n in zip(stop, chunk.start, chunk.shape, strict=True)]
        if not local.numel() or any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        whole = torch.frombuffer(read_chunk(folder, chunk), dtype=local.dtype).view(chunk.shape)
        source = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.start, strict=True))
        here = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, start, strict=True))
        staged[here] = whole[source]
    return staged


@torch.no_grad()
def commit(staged: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Copy staged boxes into their targets."""
    for key, target in targets.items():
        box(target)[0].copy_(staged[key])
