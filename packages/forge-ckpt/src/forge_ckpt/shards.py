"""Which box of each tensor this rank writes, and how boxes are put together again under another layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from forge_ckpt.error import CheckpointError
from forge_ckpt.manifest import Chunk, Entry, Manifest, read_chunk

ALIGNMENT = 64

Described = Mapping[str, Entry]
"""Tensors of a checkpoint by name."""


class Shard(Protocol):
    """The box of a tensor that this rank holds: `forge_parallel.LocalShard`, or another of this form."""

    @property
    def values(self) -> Tensor:
        """What is held, sharing memory with the tensor."""
        ...

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where in the full tensor it starts."""
        ...

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank, of all that hold the same box, writes it."""
        ...


LocalShard = Callable[[Tensor], Shard]
"""Which box of a tensor this rank holds."""

NamedShard = Callable[[str, Tensor], Shard]
"""Which box of the tensor of this name this rank holds."""


class _Full(NamedTuple):
    values: Tensor
    offsets: tuple[int, ...]
    is_first_copy: bool


def plain_shard(tensor: Tensor, is_first_copy: bool) -> Shard:
    """All of a tensor, which every rank that has it holds.

    Raises:
        CheckpointError: it is a DTensor.
    """
    if hasattr(tensor, "_local_tensor"):
        raise CheckpointError(
            f"a tensor of shape {tuple(tensor.shape)} is a DTensor; only plain tensors can be saved and "
            "loaded unless the store knows who holds what: give Store(local_shard=...), say "
            "functools.partial(forge_parallel.local_shard, mesh=mesh)"
        )
    return _Full(tensor.detach(), (0,) * tensor.ndim, is_first_copy)


def write_boxes(
    file: BinaryIO, name: str, tensors: Mapping[str, Tensor], shard: NamedShard
) -> dict[str, Entry]:
    """Write this rank's boxes into one file, one after the other, aligned.

    Returns:
        Each tensor with the chunk written here, or with none.
    """
    entries: dict[str, Entry] = {}
    for key, tensor in tensors.items():
        box = shard(key, tensor)
        local, start = box.values, box.offsets
        chunks = []
        if local.numel() and box.is_first_copy:
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


def misfits(manifest: Manifest, targets: Mapping[str, Tensor]) -> list[str]:
    """What of the targets a checkpoint does not hold in their shape and dtype, one line each."""
    wrong = [f"{key} is not in the checkpoint" for key in targets.keys() - manifest.tensors.keys()]
    for key in targets.keys() & manifest.tensors.keys():
        entry, target = manifest.tensors[key], targets[key]
        have = f"{entry.dtype} {entry.shape}"
        want = f"{str(target.dtype).removeprefix('torch.')} {list(target.shape)}"
        if have != want:
            wrong.append(f"{key} is {have}, wanted {want}")
    return wrong


def stage(
    folder: Path, manifest: Manifest, targets: Mapping[str, Tensor], shard: NamedShard
) -> dict[str, Tensor]:
    """Read the local box of each target from disk, verified, without touching the target.

    Raises:
        DamagedError: bytes that are needed are not those that were written.
    """
    return {
        key: _assemble(folder, manifest.tensors[key], shard(key, target)) for key, target in targets.items()
    }


def _assemble(folder: Path, entry: Entry, shard: Shard) -> Tensor:
    local, start = shard.values, shard.offsets
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
def commit(staged: Mapping[str, Tensor], targets: Mapping[str, Tensor], shard: NamedShard) -> None:
    """Copy staged boxes into their targets."""
    for key, target in targets.items():
        shard(key, target).values.copy_(staged[key])
