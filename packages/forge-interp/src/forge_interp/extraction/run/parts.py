"""How do rows get to disk so that a kill at any instant loses one part at most?

An extraction is a folder of `part-NNNNN.safetensors` and, when it is complete, `index.json`. A part holds the
rows of consecutive batches. The dataset alone decides which batches, so that a part has the same bytes
whichever process writes it. A part is written under another name and renamed when it is on the disk. Its
header has the request, and checksums of the inputs and of the rows.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
import tempfile
import uuid
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forge_interp.errors import InterpError

if TYPE_CHECKING:
    from forge_interp.extraction.samples import Batch

BLOCK_BYTES = 4 << 20
"""The largest block that is read or written at a time."""
ROW_COLUMNS = ("sample_id", "position", "token_id")
"""Columns of every store, beside the sites and the kept inputs, which have names of their own."""
_SPOOL_BYTES = 16 << 20  # of a part in memory; further rows wait in a file without a name
_TYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL", torch.uint8: "U8",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
}  # fmt: skip


def is_site(column: str) -> bool:
    """Whether a column is a site: only the key of a site has a colon."""
    return ":" in column


class Column(NamedTuple):
    """An array with rows as first axis: its name (see `is_site`), dtype, and the shape of a row."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def blocks(self, rows: int) -> Iterator[tuple[int, int]]:
        """Cut rows into pieces of at most BLOCK_BYTES, or one row."""
        step = max(1, BLOCK_BYTES // max(1, math.prod(self.shape) * self.dtype.itemsize))
        return ((start, min(start + step, rows)) for start in range(0, rows, step))


class Part(NamedTuple):
    """The header of a part on disk."""

    path: Path
    columns: tuple[Column, ...]  # in the order in which the model computed them, the ids last
    request: dict[str, Any]  # the arguments of the extraction
    rows: int
    batches: int
    inputs: int  # CRC-32 of the inputs of its batches
    crcs: list[int]  # CRC-32 of each column

    @classmethod
    def read(cls, path: Path) -> Part | None:
        """Read a header; None where there is no file, or file or header are damaged."""
        try:
            with safe_open(path, "pt") as file:
                crc, text = json.loads((file.metadata() or {})["forge_interp"])
        except (FileNotFoundError, SafetensorError, ValueError, KeyError, TypeError):
            return None
        if crc != zlib.crc32(text.encode()):
            return None
        data = json.loads(text)
        columns = tuple(Column(name, getattr(torch, of), tuple(shape)) for name, of, shape in data["columns"])
        return cls(path, **data | {"columns": columns, "request": json.loads(data["request"])})

    @property
    def is_intact(self) -> bool:
        """Whether all rows have the checksums of the header; reads the rows."""
        try:
            with safe_open(self.path, "pt") as file:
                return self.crcs == [self._crc(file.get_slice(c.name), c) for c in self.columns]
        except SafetensorError:
            return False

    def _crc(self, rows: Any, column: Column) -> int | None:
        crc = 0
        for start, stop in column.blocks(self.rows):
            block = rows[start:stop]
            if (block.dtype, block.shape) != (column.dtype, (stop - start, *column.shape)):
                return None
            crc = zlib.crc32(as_bytes(block), crc)
        return crc


class PartWriter:
    """Collects the rows of a part, batch by batch and site by site.

    Each batch must have the same columns. Rows beyond the memory limit wait in `folder`, if there is one.
    """

    def __init__(self, columns: tuple[Column, ...], folder: Path | None) -> None:
        self.columns = columns
        self.rows = self.batches = self._inputs = 0
        place, held_bytes = (str(folder), _SPOOL_BYTES) if folder else (None, 0)
        self._spool = tempfile.SpooledTemporaryFile(held_bytes, dir=place)  # noqa: SIM115
        self._is_on_disk = folder is not None
        self._pieces: dict[str, list[tuple[int, int]]] = {}
        self._crcs: dict[str, int] = {}
        self._pending: dict[str, tuple[Column, int]] = {}

    def write(self, name: str, values: Tensor) -> None:
        """Add rows [rows, ...] of the current batch to a column.

        InterpError: the dtype cannot be stored, or the column already has rows of this batch.
        """
        if values.dtype not in _TYPE_NAMES:
            raise InterpError(
                f"{name} has dtype {values.dtype}; expected a real one: give dtype=torch.float32, or a "
                "select such as torch.view_as_real"
            )
        if name in self._pending:
            raise InterpError(f"{name} was captured twice in one batch; expected once: name one, {name}#0")
        data = as_bytes(values)
        self._pending[name] = (Column(name, values.dtype, tuple(values.shape[1:])), len(values))
        self._pieces.setdefault(name, []).append((self._spool.tell(), len(data)))
        self._crcs[name] = zlib.crc32(data, self._crcs.get(name, 0))
        self._spool.write(data)

    def commit(self, batch: Batch) -> None:
        """End a batch; InterpError where columns differ from earlier batches, or rows between columns."""
        columns = tuple(column for column, _ in self._pending.values())
        if self.columns and set(columns) != set(self.columns):
            new, old = set(columns) - set(self.columns), set(self.columns) - set(columns)
            raise InterpError(
                f"batch {batch.number} captured {listed(new)}, those before {listed(old)}; expected the same "
                "of each: extract sites that not every batch reaches in a call of their own; cut or pad rows "
                "of other shapes with select, or pool"
            )
        rows = {name: count for name, (_, count) in self._pending.items()}
        if len(set(rows.values())) != 1:
            raise InterpError(
                f"batch {batch.number} has rows {rows}; expected one number: extract sites with other rows "
                "in a call of their own, or pool"
            )
        self.columns = self.columns or columns
        self.rows, self.batches = self.rows + next(iter(rows.values())), self.batches + 1
        self._inputs, self._pending = batch.checksum(self._inputs) if self._is_on_disk else 0, {}

    def publish(self, path: Path, request: str) -> None:
        """Put the part on the disk in place of an older one, with `request` (JSON) in its header."""
        data = {
            "columns": [(name, dtype_name(dtype), shape) for name, dtype, shape in self.columns],
            "request": request,
            "rows": self.rows,
            "batches": self.batches,
            "inputs": self._inputs,
            "crcs": [self._crcs[column.name] for column in self.columns],
        }
        ordered = sorted(self.columns, key=lambda column: -column.dtype.itemsize)  # so that each is aligned
        text, end = dump(data), 0
        header: dict[str, Any] = {"__metadata__": {"forge_interp": dump([zlib.crc32(text.encode()), text])}}
        for name, dtype, shape in ordered:
            start, end = end, end + self.rows * math.prod(shape) * dtype.itemsize
            offsets = {"data_offsets": [start, end]}
            header[name] = {"dtype": _TYPE_NAMES[dtype], "shape": [self.rows, *shape]} | offsets
        head = json.dumps(header, separators=(",", ":")).encode()
        head += b" " * (-(8 + len(head)) % 64)
        with replacing(path) as file:
            file.write(struct.pack("<Q", len(head)) + head)
            for block in (block for column in ordered for block in self.blocks(column)):
                file.write(block)
        self.close()

    def close(self) -> None:
        """Drop all rows."""
        self._spool.close()

    def tensors(self) -> dict[str, Tensor]:
        """Return all rows by column."""
        found = {}
        for name, dtype, shape in self.columns:
            data = bytearray().join(self.blocks(Column(name, dtype, shape)))
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            found[name] = flat.view(self.rows, *shape)
        return found

    def blocks(self, column: Column) -> Iterator[bytes]:
        """Yield the bytes of a column."""
        for offset, size in self._pieces[column.name]:
            self._spool.seek(offset)
            for start in range(0, size, BLOCK_BYTES):
                yield self._spool.read(min(BLOCK_BYTES, size - start))


@contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """Open a new file that takes the name `path` once it is complete on disk, and is removed otherwise."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except FileNotFoundError:
        if not path.exists():  # else a process that does the same was faster, and has tidied up
            raise
    finally:
        partial.unlink(missing_ok=True)


def dump(data: Any) -> str:
    """Return JSON that is the same for equal data."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as 'bfloat16'."""
    return str(dtype).removeprefix("torch.")


def as_bytes(values: Tensor) -> memoryview:
    """Return the bytes of a tensor; without a copy when it is contiguous and on the CPU."""
    if not values.numel():
        return memoryview(b"")
    kept = values.detach().cpu().contiguous()
    # Not by way of numpy, which fixes the size of the storage for good: FSDP2 sets it to 0 when it reshards.
    buffer = (ctypes.c_ubyte * kept.nbytes).from_address(kept.data_ptr())
    buffer.keeps = kept  # type: ignore[attr-defined]
    return memoryview(buffer).cast("B")


def listed(columns: Iterable[Column]) -> str:
    """Return names, row shapes and dtypes, for messages."""
    texts = [f"{c.name} {list(c.shape)} {dtype_name(c.dtype)}" for c in columns]
    return ", ".join(sorted(texts)) or "nothing else"
