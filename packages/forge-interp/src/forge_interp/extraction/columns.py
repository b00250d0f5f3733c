"""What is one array of an extraction, and where do its rows lie on disk?

A column is an array whose first axis is rows. Its bytes are little-endian and C-ordered everywhere, so that
every format differs only in what surrounds them.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_interp.errors import InterpError

BLOCK_BYTES = 4 << 20
"""How much is read or written at a time."""

# What numpy calls the stored bytes; numpy has no bfloat16 and no float8, whose bits are stored as integers.
NUMPY_TYPES = {
    torch.float64: "<f8",
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.bfloat16: "<u2",
    torch.float8_e4m3fn: "|u1",
    torch.float8_e5m2: "|u1",
    torch.int64: "<i8",
    torch.int32: "<i4",
    torch.int16: "<i2",
    torch.int8: "|i1",
    torch.uint8: "|u1",
    torch.bool: "|b1",
}
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


@dataclass(frozen=True)
class Column:
    """An array of rows.

    Attributes:
        name: a site key, or `sample_id`, `position`, `token_id`.
        dtype: of the values as captured.
        shape: of one row.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in NUMPY_TYPES:
            raise InterpError(
                f"{self.name} has dtype {self.dtype}; expected a real one: give dtype=torch.float32, or a "
                "select such as torch.view_as_real"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def numpy_type(self) -> str:
        """The numpy type string of the stored bytes; bfloat16 is '<u2'."""
        return NUMPY_TYPES[self.dtype]

    @property
    def file_name(self) -> str:
        """The name with the one character escaped that no file name can hold."""
        return self.name.replace("%", "%25").replace("/", "%2F")

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return {"name": self.name, "dtype": dtype_name(self.dtype), "shape": list(self.shape)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Column:
        """Return the column that `to_json` described."""
        return cls(data["name"], getattr(torch, data["dtype"]), tuple(data["shape"]))


def dtype_name(dtype: torch.dtype) -> str:
    """Return e.g. 'bfloat16'."""
    return str(dtype).removeprefix("torch.")


def as_bytes(values: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor; without a copy when it is contiguous."""
    if not values.numel():
        return memoryview(b"")
    kept = values.detach().cpu().contiguous()
    # Not by way of numpy, which fixes the size of the storage for good: FSDP2 sets it to 0 when it reshards.
    buffer = (ctypes.c_ubyte * kept.nbytes).from_address(kept.data_ptr())
    buffer.keeps = kept  # type: ignore[attr-defined]
    return memoryview(buffer).cast("B")


@dataclass(frozen=True)
class Flat:
    """Rows one after the other in a file.

    Attributes:
        column: what the rows are.
        rows: how many.
        path: the file.
        offset: the byte where they begin.
    """

    column: Column
    rows: int
    path: Path
    offset: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the file is long enough."""
        return self.path.stat().st_size >= self.offset + self.rows * self.column.row_bytes

    def map(self) -> Tensor:
        """Return [rows, ...], read from disk as it is used; writing to it never reaches the file."""
        shape = (self.rows, *self.column.shape)
        if not math.prod(shape):
            return torch.empty(shape, dtype=self.column.dtype)
        flags = mmap.MAP_PRIVATE | _NO_RESERVE  # or a file larger than memory could not be mapped for writing
        with self.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        flat = torch.frombuffer(mapped, dtype=self.column.dtype, count=math.prod(shape), offset=self.offset)
        return flat.view(shape)

    def read(self, start: int, stop: int) -> Tensor:
        """Return a copy of rows [start, stop), which costs no more memory than these rows."""
        out = torch.empty((stop - start, *self.column.shape), dtype=self.column.dtype)
        self.read_into(out, start)
        return out

    def read_into(self, out: Tensor, start: int) -> None:
        """Fill a contiguous tensor with the rows from `start` on."""
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset + start * self.column.row_bytes)
            fill(file, as_bytes(out), self.path)


@dataclass(frozen=True)
class Chunked:
    """Rows in files of `chunk_rows` rows each, the last one padded, named as in a zarr v3 array."""

    column: Column
    rows: int
    folder: Path
    chunk_rows: int

    @property
    def is_whole(self) -> bool:
        """Whether all files are there and long enough."""
        chunks = -(-self.rows // self.chunk_rows) if self.column.row_bytes else 0
        pieces = (Flat(self.column, self.chunk_rows, self.path(chunk)) for chunk in range(chunks))
        return all(piece.path.is_file() and piece.is_whole for piece in pieces)

    def path(self, chunk: int) -> Path:
        """Return the file of a chunk."""
        return self.folder.joinpath("c", str(chunk), *["0"] * len(self.column.shape))

    def map(self) -> Tensor:
        """Return all rows [rows, ...] in memory."""
        return self.read(0, self.rows)

    def read(self, start: int, stop: int) -> Tensor:
        """Return a copy of rows [start, stop)."""
        out = torch.empty((stop - start, *self.column.shape), dtype=self.column.dtype)
        for chunk, first, last in self._pieces(start, stop):
            base = chunk * self.chunk_rows
            piece = Flat(self.column, self.chunk_rows, self.path(chunk))
            piece.read_into(out[first - start : last - start], first - base)
        return out

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        while start < stop:
            chunk = start // self.chunk_rows
            last = min(stop, (chunk + 1) * self.chunk_rows)
            yield chunk, start, last
            start = last


Located = Flat | Chunked


def fill(file: Any, buffer: memoryview, path: Path) -> None:
    """Read from an unbuffered file until the buffer is full; raise InterpError where the file ends before."""
    done = 0
    while done < len(buffer):
        got = file.readinto(buffer[done:])
        if not got:
            raise InterpError(
                f"{path} ends {len(buffer) - done} bytes early; it is damaged: extract it again"
            )
        done += got


def write_all(file: Any, data: memoryview | bytes) -> None:
    """Write everything to an unbuffered file; the system may take less than it is given at once."""
    view = memoryview(data)
    while len(view):
        view = view[file.write(view) :]
