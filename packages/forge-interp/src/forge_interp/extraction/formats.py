"""How do columns become one file or folder that other tools open, and how are they found in it again?

Every writer is given the columns, the number of rows and a function that yields the bytes of a column in
blocks; it holds one block at a time. The bytes written depend on nothing else: no clock, no file system
order. Formats: `.npz` (numpy), `.safetensors`, `.zarr` (version 3, uncompressed), `.npy` (one site; the ids
beside it in `NAME.rows.npz`), and a folder of `.npy` files.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from forge_interp.errors import InterpError
from forge_interp.extraction.columns import BLOCK_BYTES, Chunked, Column, Flat, Located, dtype_name, write_all

ROW_COLUMNS = tuple(Column(name, torch.int64) for name in ("sample_id", "position", "token_id"))
Blocks = Callable[[Column], Iterator[memoryview]]
Contents = tuple[dict[str, Any], dict[str, Located]]

_ALIGN = 64  # so that a memory-mapped array can be used as it lies in the file
_FORMAT = 1
_ZARR_CHUNK_BYTES = 8 << 20
_SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Format(NamedTuple):
    """One kind of output.

    Attributes:
        write: (path, columns, rows, blocks, metadata) -> the paths written, the one that counts last.
        open: path -> metadata and where each column lies.
    """

    write: Callable[[Path, Sequence[Column], int, Blocks, dict[str, Any]], list[Path]]
    open: Callable[[Path], Contents]


def format_of(path: Path) -> Format:
    """Return the format that a name asks for.

    Raises:
        InterpError: the suffix is that of another kind of file.
    """
    if path.suffix in _FORMATS:
        return _FORMATS[path.suffix]
    if path.suffix in (".pt", ".pth", ".bin", ".h5", ".hdf5", ".parquet", ".arrow", ".zip", ".json"):
        raise InterpError(
            f"out is {str(path)!r}; expected a name that ends in {', '.join(_FORMATS)}, or one without such "
            "an ending for a folder of .npy files"
        )
    return _FOLDER


def describe(columns: Sequence[Column], rows: int, request: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata that every format carries."""
    sites = [column for column in columns if column not in ROW_COLUMNS]
    return {
        "format": _FORMAT,
        "rows": rows,
        "sites": [column.name for column in sites],
        "dtypes": {column.name: dtype_name(column.dtype) for column in columns},
        "request": request,
    }


def dump(data: Any) -> str:
    """Return JSON that is the same for equal data."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


# ---- npy: a header of 64-byte multiples, then the rows


def _npy_header(numpy_type: str, shape: tuple[int, ...]) -> bytes:
    header = io.BytesIO()
    fields = {"descr": numpy_type, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, fields)
    return header.getvalue()


def _write_npy(path: Path, column: Column, rows: int, blocks: Blocks) -> None:
    with path.open("wb", buffering=0) as file:
        write_all(file, _npy_header(column.numpy_type, (rows, *column.shape)))
        for block in blocks(column):
            write_all(file, block)
        os.fsync(file.fileno())


def _find_npy(path: Path, start: int, name: str, dtype: torch.dtype) -> Flat:
    """Find the rows of an array that begins at byte `start` of a file."""
    with path.open("rb") as file:
        file.seek(start)
        if np.lib.format.read_magic(file) != (1, 0):
            raise InterpError(
                f"{path}: {name} is no .npy array of version 1.0; expected one written by forge-interp"
            )
        shape, _, _ = np.lib.format.read_array_header_1_0(file)
        return Flat(Column(name, dtype, shape[1:]), shape[0], path, file.tell())


# ---- npz: a zip of npy members, not compressed


def _write_npz(
    path: Path, columns: Sequence[Column], rows: int, blocks: Blocks, metadata: dict
) -> list[Path]:
    with path.open("wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        member = io.BytesIO()
        np.lib.format.write_array(member, np.array(dump(metadata)), version=(1, 0))
        _write_member(archive, "metadata", iter([memoryview(member.getvalue())]))
        for column in columns:
            header = _npy_header(column.numpy_type, (rows, *column.shape))
            _write_member(archive, column.file_name, _after(header, blocks(column)))
        archive.close()
        file.flush()
        os.fsync(file.fileno())
    return [path]


def _after(header: bytes, blocks: Iterator[memoryview]) -> Iterator[memoryview]:
    yield memoryview(header)
    yield from blocks


def _write_member(archive: zipfile.ZipFile, name: str, blocks: Iterator[memoryview]) -> None:
    info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
    info.external_attr = 0o644 << 16
    assert archive.fp is not None
    # A local header has 30 bytes, the name, 20 bytes of zip64 sizes, and here an extra field that aligns.
    start = archive.fp.tell() + 30 + len(info.filename.encode()) + 20
    padding = -(start + 4) % _ALIGN
    info.extra = struct.pack("<HH", 0x4246, padding) + bytes(padding)
    with archive.open(info, "w", force_zip64=True) as member:
        for block in blocks:
            member.write(block)


def _open_npz(path: Path) -> Contents:
    with zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if "metadata" not in members:
            raise InterpError(f"{path} has no member 'metadata'; expected a file written by forge-interp")
        with archive.open(members.pop("metadata")) as member:
            metadata = json.loads(str(np.lib.format.read_array(member)))
    located: dict[str, Located] = {}
    for name, dtype in _dtypes(metadata).items():
        info = members.get(Column(name, dtype).file_name)
        if info is None:  # the site of a single .npy file
            continue
        with path.open("rb") as file:
            file.seek(info.header_offset + 26)
            name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
        located[name] = _find_npy(path, info.header_offset + 30 + name_bytes + extra_bytes, name, dtype)
    return metadata, located


# ---- safetensors


def _write_safetensors(
    path: Path, columns: Sequence[Column], rows: int, blocks: Blocks, metadata: dict
) -> list[Path]:
    ordered = sorted(
        columns, key=lambda column: -column.dtype.itemsize
    )  # so that each is aligned to its items
    header: dict[str, Any] = {"__metadata__": {"forge_interp": dump(metadata)}}
    end = 0
    for column in ordered:
        start, end = end, end + rows * column.row_bytes
        kind = _SAFETENSORS_TYPES[column.dtype]
        header[column.name] = {"dtype": kind, "shape": [rows, *column.shape], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    with path.open("wb", buffering=0) as file:
        write_all(file, struct.pack("<Q", len(text)) + text)
        for column in ordered:
            for block in blocks(column):
                write_all(file, block)
        os.fsync(file.fileno())
    return [path]


def _open_safetensors(path: Path) -> Contents:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    kinds = {kind: dtype for dtype, kind in _SAFETENSORS_TYPES.items()}
    text = header.pop("__metadata__", {}).get("forge_interp")
    if text is None:
        raise InterpError(f"{path} has no metadata 'forge_interp'; expected a file written by forge-interp")
    located: dict[str, Located] = {}
    for name, entry in header.items():
        column = Column(name, kinds[entry["dtype"]], tuple(entry["shape"][1:]))
        located[name] = Flat(column, entry["shape"][0], path, 8 + size + entry["data_offsets"][0])
    return json.loads(text), located


# ---- zarr, version 3: https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html


def _write_zarr(
    path: Path, columns: Sequence[Column], rows: int, blocks: Blocks, metadata: dict
) -> list[Path]:
    path.mkdir()
    group = {"zarr_format": 3, "node_type": "group", "attributes": {"forge_interp": metadata}}
    _write_text(path / "zarr.json", dump(group))
    for column in columns:
        target = Chunked(column, rows, path / column.file_name, _zarr_chunk_rows(column, rows))
        target.folder.mkdir()
        _write_text(target.folder / "zarr.json", dump(_zarr_array(target)))
        _write_chunks(target, blocks(column))
    return [path]


def _zarr_chunk_rows(column: Column, rows: int) -> int:
    """Rows of a chunk: chunks of one size, so that the last, which must be as long, has little to fill up."""
    most = max(1, _ZARR_CHUNK_BYTES // max(1, column.row_bytes))
    chunks = max(1, -(-rows // most))
    return max(1, -(-rows // chunks))


def _zarr_array(target: Chunked) -> dict[str, Any]:
    kind = np.dtype(target.column.numpy_type)
    shape = target.column.shape
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [target.rows, *shape],
        "data_type": kind.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [target.chunk_rows, *shape]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": False if kind.kind == "b" else 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {"dtype": dtype_name(target.column.dtype)},
    }


def _write_chunks(target: Chunked, blocks: Iterator[memoryview]) -> None:
    """Cut the bytes of a column into chunk files; the last is filled up with zeros, as zarr wants it."""
    size, chunk = target.chunk_rows * target.column.row_bytes, 0
    pending = next(blocks, None)
    while pending is not None:
        path = target.path(chunk)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb", buffering=0) as file:
            left = size
            while left and pending is not None:
                write_all(file, pending[:left])
                taken = min(left, len(pending))
                left, pending = left - taken, pending[taken:]
                pending = pending if len(pending) else next(blocks, None)
            while left:
                left -= file.write(bytes(min(left, BLOCK_BYTES)))
            os.fsync(file.fileno())
        chunk += 1


def _open_zarr(path: Path) -> Contents:
    metadata = json.loads((path / "zarr.json").read_text()).get("attributes", {}).get("forge_interp")
    if metadata is None:
        raise InterpError(f"{path} has no attribute 'forge_interp'; expected a group written by forge-interp")
    located: dict[str, Located] = {}
    for name, dtype in _dtypes(metadata).items():
        folder = path / Column(name, dtype).file_name
        array = json.loads((folder / "zarr.json").read_text())
        chunk_rows = array["chunk_grid"]["configuration"]["chunk_shape"][0]
        located[name] = Chunked(
            Column(name, dtype, tuple(array["shape"][1:])), array["shape"][0], folder, chunk_rows
        )
    return metadata, located


# ---- a folder of .npy files, and a single .npy file


def _write_folder(
    path: Path, columns: Sequence[Column], rows: int, blocks: Blocks, metadata: dict
) -> list[Path]:
    path.mkdir()
    for column in columns:
        _write_npy(path / f"{column.file_name}.npy", column, rows, blocks)
    _write_text(path / "manifest.json", dump(metadata))
    return [path]


def _open_folder(path: Path) -> Contents:
    manifest = path / "manifest.json"
    if not manifest.is_file():
        raise InterpError(f"{path} has no manifest.json; expected a folder written by forge-interp")
    metadata = json.loads(manifest.read_text())
    located: dict[str, Located] = {
        name: _find_npy(path / f"{Column(name, dtype).file_name}.npy", 0, name, dtype)
        for name, dtype in _dtypes(metadata).items()
    }
    return metadata, located


def rows_beside(path: Path) -> Path:
    """Return where the ids of a single `.npy` file lie: `acts.npy` -> `acts.rows.npz`."""
    return path.with_name(f"{path.stem}.rows.npz")


def _write_single(
    path: Path, columns: Sequence[Column], rows: int, blocks: Blocks, metadata: dict
) -> list[Path]:
    sites = [column for column in columns if column not in ROW_COLUMNS]
    check_sites(path, [column.name for column in sites])
    beside = _write_npz(rows_beside(path), ROW_COLUMNS, rows, blocks, metadata)
    _write_npy(path, sites[0], rows, blocks)
    return [*beside, path]


def check_sites(path: Path, sites: Sequence[str]) -> None:
    """Raise InterpError when a format cannot hold so many sites."""
    if path.suffix == ".npy" and len(sites) != 1:
        raise InterpError(
            f"out is a single .npy file for {len(sites)} sites ({', '.join(sites[:4])}, ...); expected one: "
            "name a folder (a path without a suffix) or .npz, .safetensors, .zarr"
        )


def _open_single(path: Path) -> Contents:
    beside = rows_beside(path)
    if not beside.is_file():
        raise InterpError(f"{beside} is missing; expected the ids of the rows of {path.name} beside it")
    metadata, located = _open_npz(beside)
    (name,) = metadata["sites"]
    located[name] = _find_npy(path, 0, name, getattr(torch, metadata["dtypes"][name]))
    return metadata, located


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _dtypes(metadata: dict[str, Any]) -> dict[str, torch.dtype]:
    return {name: getattr(torch, dtype) for name, dtype in metadata["dtypes"].items()}


_FORMATS = {
    ".npz": Format(_write_npz, _open_npz),
    ".safetensors": Format(_write_safetensors, _open_safetensors),
    ".zarr": Format(_write_zarr, _open_zarr),
    ".npy": Format(_write_single, _open_single),
}
_FOLDER = Format(_write_folder, _open_folder)
