"""What a checkpoint is made of: of every byte, where it belongs and what it must be. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash
from forge_config import Config

from forge_ckpt.error import DamagedError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
NAME = "manifest.json"
_FILE = re.compile(r"rank-\d{5}\.bin")


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment, as far as this rank holds it.

    Attributes:
        tensors: whole or sharded, by name; ranks may hold different ones.
        meta: everything else that is one for all ranks, as JSON; that of the first rank is saved.
        values: plain values by name, as JSON; those of all ranks are put together.
    """

    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


class Chunk(Config):
    """A box of a tensor, in one piece of one file.

    Attributes:
        file: name of the file in the checkpoint.
        offset: first byte.
        num_bytes: how many.
        start: index of its first element in the whole tensor.
        shape: of the box.
        digest: xxh3-128 of the bytes.
    """

    file: str
    offset: int
    num_bytes: int
    start: list[int]
    shape: list[int]
    digest: str


class Entry(Config):
    """One tensor.

    Attributes:
        dtype: as torch names it, e.g. float32.
        shape: of the whole.
        chunks: boxes that together make it up.
    """

    dtype: str
    shape: list[int]
    chunks: list[Chunk]


class Manifest(Config):
    """A checkpoint.

    Attributes:
        format: version of this layout.
        step: optimizer steps taken.
        world_size: ranks that wrote it.
        torch: version of torch.
        meta: everything that is no tensor and is one for all ranks.
        values: plain values by name, of all ranks together.
        files: size of each file in bytes.
        tensors: each tensor by name.
    """

    format: int
    step: int
    world_size: int
    torch: str
    meta: dict[str, Any]
    values: dict[str, Any]
    files: dict[str, int]
    tensors: dict[str, Entry]

    def __post_init__(self) -> None:
        for name in self.files:
            if not _FILE.fullmatch(name):
                raise ValueError(f"file name {name!r} is not one we write")
        for key, entry in self.tensors.items():
            if sum(prod(chunk.shape) for chunk in entry.chunks) != prod(entry.shape):
                raise ValueError(f"the chunks of {key} do not make up the tensor")
            for chunk in entry.chunks:
                if chunk.offset < 0 or chunk.offset + chunk.num_bytes > self.files.get(chunk.file, -1):
                    raise ValueError(f"a chunk of {key} lies outside its file")


def encode(manifest: Manifest) -> bytes:
    """The manifest with its own digest in the first line."""
    body = msgspec.json.encode(manifest)
    return xxhash.xxh3_128_hexdigest(body).encode() + b"\n" + body


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint, its digest and the sizes of all files compared.

    Raises:
        DamagedError: names what is wrong.
    """
    path = folder / NAME
    try:
        digest, _, body = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error}") from None
    if xxhash.xxh3_128_hexdigest(body).encode() != digest:
        raise DamagedError(f"{path} does not match its digest")
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except msgspec.MsgspecError as error:
        raise DamagedError(f"{path} is not a manifest: {error}") from None
    if manifest.format != FORMAT:
        raise DamagedError(f"{path} has format {manifest.format}; this version reads format {FORMAT}")
    for name, size in manifest.files.items():
        file = folder / name
        if not file.is_file() or file.is_symlink() or file.stat().st_size != size:
            raise DamagedError(f"{file} is missing or has not the {size} bytes it should have")
    return manifest


def read_chunk(folder: Path, chunk: Chunk) -> bytearray:
    """The bytes of a chunk, compared with their digest.

    Raises:
        DamagedError: they differ.
    """
    data = bytearray(chunk.num_bytes)
    with (folder / chunk.file).open("rb", buffering=0) as file:
        file.seek(chunk.offset)
        view = memoryview(data)
        while len(view) and (count := file.readinto(view)):
            view = view[count:]
    if xxhash.xxh3_128_hexdigest(data) != chunk.digest:
        raise DamagedError(f"{folder / chunk.file} is damaged at byte {chunk.offset}")
    return data
