"""The tensors of a torch DCP checkpoint, as torchtitan writes: nothing is unpickled in this process."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from forge_ckpt.error import CheckpointError, DamagedError, UnreadableError, UnsupportedError
from forge_ckpt.interop.dcp_read import METADATA, REFUSED
from forge_ckpt.layout import Layout, require_cover
from forge_ckpt.manifest import ITEM_BYTES

if TYPE_CHECKING:
    from torch import Tensor

NOT_MODEL = ("optimizer.", "optim.", "lr_scheduler.", "dataloader.", "train_state.")
"""What names begin with that are no weights, in the checkpoints of torchtitan and others."""

Shape = tuple[int, ...]


class Values(msgspec.Struct, frozen=True):
    """The place of the values of a chunk; see `dcp_read.located`."""

    dtype: str
    offset: int
    size: Shape
    stride: Shape
    crc: int
    first: int
    bytes: int


class Chunk(msgspec.Struct, frozen=True):
    """A box of a tensor: its start, its extents, and its file."""

    start: Shape
    size: Shape
    file: str
    values: Values


class Described(msgspec.Struct, frozen=True):
    """A tensor."""

    dtype: str
    size: Shape
    chunks: list[Chunk]

    def check(self, name: str) -> None:
        """Check that its chunks make up the tensor, and that each lies in its storage.

        Raises:
            CheckpointError: they do not.
        """
        item = ITEM_BYTES.get(self.dtype)
        if item is None:
            raise CheckpointError(f"{name} is {self.dtype}")
        order = range(len(self.chunks))
        layout = Layout([*order], [one.start for one in self.chunks], [one.size for one in self.chunks])
        require_cover(name, self.size, layout)
        for chunk in self.chunks:
            values = chunk.values
            last = values.offset + sum((n - 1) * s for n, s in zip(values.size, values.stride, strict=False))
            if (values.dtype or self.dtype, values.size) != (self.dtype, chunk.size):
                raise CheckpointError(f"a chunk of {name} is {values.dtype} {list(values.size)}")
            if len(values.stride) != len(values.size) or (last + 1) * item > values.bytes:
                raise CheckpointError(f"a chunk of {name} reaches beyond its storage")
            if prod(values.size) * item > values.bytes:
                raise CheckpointError(f"a chunk of {name} has more elements than its storage")


class _Contents(msgspec.Struct, frozen=True):
    tensors: dict[str, Described]
    others: list[str]


class DcpTensors(Mapping[str, "Tensor"]):
    """The tensors of a DCP checkpoint by name; each is read, and its CRC-32 compared, on access.

    Args:
        folder: with a `.metadata`.

    Raises:
        UnreadableError: it cannot be read.
        UnsupportedError: it is not as torch 2.11 to 2.15 writes it, or names a forbidden class.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / METADATA).is_file():
            raise CheckpointError(f"there is no {folder / METADATA}; expected a folder written by torch DCP")
        try:
            contents = msgspec.json.decode(_read_apart(folder), type=_Contents)
            for name, tensor in contents.tensors.items():
                tensor.check(name)
        except (msgspec.MsgspecError, CheckpointError) as error:
            raise (
                error if type(error) is UnsupportedError else UnsupportedError(f"{folder}: {error}")
            ) from None
        self.tensors, self.others = contents.tensors, contents.others

    def __getitem__(self, name: str) -> Tensor:
        import torch

        described = self.tensors[name]
        tensor = torch.empty(described.size, dtype=getattr(torch, described.dtype))
        for chunk in described.chunks:
            here = tuple(slice(a, a + n) for a, n in zip(chunk.start, chunk.size, strict=True))
            values, path = chunk.values, self.folder / chunk.file
            flat = torch.frombuffer(_read_values(path, values), dtype=tensor.dtype)
            tensor[here] = flat.as_strided(values.size, values.stride, values.offset)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def on_meta(self) -> dict[str, Tensor]:
        """Return dtypes and shapes as tensors on the meta device."""
        import torch

        return {
            name: torch.empty(entry.size, dtype=getattr(torch, entry.dtype), device="meta")
            for name, entry in self.tensors.items()
        }

    def weights(self, prefix: str = "") -> tuple[dict[str, str], list[str]]:
        """Return the weights of the model by names without the prefix, and the names of all other tensors.

        Raises:
            UnsupportedError: the prefix is that of an optimizer; or there are none.
        """
        if prefix.startswith(NOT_MODEL):
            raise UnsupportedError(
                f"given the prefix {prefix!r}: state of an optimizer is not taken over. Which parameters "
                "share a group, what momenta mean and how steps are counted is known to the trainer that "
                "wrote them; start from the weights, with a warm-up"
            )
        named = {
            name.removeprefix(prefix): name
            for name in self.tensors
            if name.startswith(prefix) and not name.startswith(NOT_MODEL)
        }
        if not named:
            raise UnsupportedError(f"{self.folder} holds no weights whose names begin with {prefix!r}")
        taken = {*named.values()}
        return named, sorted([*(name for name in self.tensors if name not in taken), *self.others])


def _read_apart(folder: Path) -> bytes:
    """Read the pickles of a checkpoint in another process."""
    command = [sys.executable, "-I", "-m", "forge_ckpt.interop.dcp_read", os.path.abspath(folder)]
    done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode == 0:
        return done.stdout
    message = done.stderr.decode(errors="replace")[-2000:].strip()
    if done.returncode == REFUSED:
        raise UnsupportedError(f"{folder} is not read: {message}")
    raise UnsupportedError(f"{folder} is not read: its reader ended with {done.returncode}: {message[-200:]}")


def _read_values(path: Path, values: Values) -> bytearray:
    """Return the bytes of a storage, compared with their CRC-32."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size < values.first + values.bytes:
                raise DamagedError(path, "is too short")
            data = bytearray(values.bytes)
            file.seek(values.first)
            rest = memoryview(data)
            while len(rest) and (count := file.readinto(rest)):
                rest = rest[count:]
    except FileNotFoundError:
        raise DamagedError(path, "is missing") from None
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error}") from None
    if zlib.crc32(data) != values.crc:
        raise DamagedError(path, f"is damaged between bytes {values.first} and {values.first + values.bytes}")
    return data
