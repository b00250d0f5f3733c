"""Checkpoints of format 1, read as if they were of the present one. Imports no torch.

Its manifest names every chunk with a digest of its own, and there are no index files. What the index of a
rank would say is found by reading its file once: each chunk is compared, and each block gets a digest.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from forge_ckpt import manifest as manifests
from forge_ckpt.error import CheckpointError, DamagedError, UnreadableError
from forge_ckpt.layout import Entry, Layout, Shape

FORMAT = 1
BLOCK_BYTES = 1 << 18


class _Chunk(msgspec.Struct, frozen=True):
    file: str
    offset: int
    num_bytes: int
    start: Shape
    shape: Shape
    digest: str


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: Shape
    chunks: list[_Chunk]


class Manifest1(msgspec.Struct, frozen=True):
    """The manifest of format 1."""

    step: int
    world_size: int
    torch: str
    meta: dict[str, Any]
    files: dict[str, int]
    tensors: dict[str, _Entry]
    values: dict[str, Any] = {}

    def chunks(self, rank: int) -> dict[str, _Chunk]:
        """What a rank wrote, by tensor."""
        name = manifests.values_name(rank)
        return {
            key: chunk for key, entry in self.tensors.items() for chunk in entry.chunks if chunk.file == name
        }

    def translated(self) -> manifests.Manifest:
        """The same in the present format.

        Raises:
            CheckpointError: it is not one that was written.
        """
        ranks = {manifests.values_name(rank): rank for rank in range(min(self.world_size, 1 << 20))}
        layouts: dict[Any, int] = {}
        tensors = {}
        for key, entry in self.tensors.items():
            if any(chunk.file not in self.files or chunk.file not in ranks for chunk in entry.chunks):
                raise CheckpointError(f"{key} lies in a file that no rank writes")
            chunks = sorted(entry.chunks, key=lambda chunk: ranks[chunk.file])
            layout = tuple((ranks[chunk.file], chunk.start, chunk.shape) for chunk in chunks)
            for chunk in chunks:
                if chunk.num_bytes != prod(chunk.shape) * manifests.ITEM_BYTES.get(entry.dtype, 0):
                    raise CheckpointError(f"a chunk of {key} has {chunk.num_bytes} bytes")
            tensors[key] = Entry(entry.dtype, entry.shape, layouts.setdefault(layout, len(layouts)))
        return manifests.Manifest(
            format=FORMAT,
            step=self.step,
            torch=self.torch,
            milestone=False,
            meta=self.meta,
            values=self.values,
            files=[manifests.File(self.files.get(name, 0), 0, "") for name in ranks],
            layouts=[
                Layout([r for r, _, _ in one], [a for _, a, _ in one], [n for _, _, n in one])
                for one in layouts
            ],
            tensors=tensors,
        )


def index_of(written: Manifest1, path: Path, rank: int) -> manifests.Index:
    """The index that a rank would write now; reads all of its file, every chunk compared with its digest.

    Raises:
        DamagedError: a chunk is not what was written.
        UnreadableError: it cannot be read now.
    """
    of = written.chunks(rank)
    digests, begun, place = [], xxhash.xxh3_128(), 0
    waiting = sorted(of.items(), key=lambda item: item[1].offset, reverse=True)
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digests.append(manifests.digest(block))
                end = place + len(block)
                while waiting and waiting[-1][1].offset < end:
                    key, chunk = waiting[-1]
                    last = chunk.offset + chunk.num_bytes
                    begun.update(block[max(0, chunk.offset - place) : max(0, last - place)])
                    if last > end:
                        break
                    if begun.hexdigest() != chunk.digest:
                        raise DamagedError(path, f"does not hold {key} as it was written")
                    begun.reset()
                    waiting.pop()
                place = end
    except FileNotFoundError:
        raise DamagedError(path, "is missing") from None
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error}") from None
    if any(chunk.num_bytes for _, chunk in waiting):
        raise DamagedError(path, "ends before what it should hold")
    offsets = {key: chunk.offset for key, chunk in of.items()}
    return manifests.Index(BLOCK_BYTES, manifests.encode_digests(digests), offsets)
