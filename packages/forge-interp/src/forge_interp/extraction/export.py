"""How does an extraction become one file that other tools open?

The bytes written depend on the rows alone: no clock, no file system order.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forge_interp.errors import InterpError, optional
from forge_interp.extraction.run.parts import Column, as_bytes, dtype_name, replacing, write_safetensors

if TYPE_CHECKING:
    from forge_interp.extraction.store import ActivationStore


def export(store: ActivationStore, path: Path) -> None:
    """See `ActivationStore.export`."""
    if path.suffix not in _WRITERS:
        raise InterpError(f"path is {str(path)!r}; expected a name that ends in {', '.join(_WRITERS)}")
    _WRITERS[path.suffix](store, path)


def _safetensors(store: ActivationStore, path: Path) -> None:
    blocks = store.blocks
    write_safetensors(path, store.columns, store.rows, lambda c: map(as_bytes, blocks(c)), store.metadata)


def _npz(store: ActivationStore, path: Path) -> None:
    with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for column in store.columns:
            info = zipfile.ZipInfo(f"{_file_name(column)}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            with archive.open(info, "w", force_zip64=True) as member:
                _write_array(member, store, column)


def _npy(store: ActivationStore, path: Path) -> None:
    if len(store.sites) != 1:
        raise InterpError(
            f"a single .npy file for {len(store.sites)} sites ({', '.join(store.sites[:4])}, ...); expected "
            "one: take .npz, .safetensors or .zarr"
        )
    with replacing(path) as file:
        _write_array(file, store, store.columns[0])


def _write_array(file: Any, store: ActivationStore, column: Column) -> None:
    kind = np.lib.format.dtype_to_descr(_dtype(column))
    fields = {"descr": kind, "fortran_order": False, "shape": (store.rows, *column.shape)}
    np.lib.format.write_array_header_1_0(file, fields)
    for block in store.blocks(column):
        file.write(as_bytes(block))


def _zarr(store: ActivationStore, path: Path) -> None:
    group = optional("zarr", "an export to .zarr", "zarr").open_group(path, mode="w")
    group.attrs["forge_interp"] = store.metadata
    for column in store.columns:
        step = next(iter(column.blocks(store.rows)), (0, 1))[1]
        shape, chunks = (store.rows, *column.shape), (step, *(max(1, size) for size in column.shape))
        array = group.create_array(_file_name(column), shape=shape, dtype=_dtype(column), chunks=chunks)
        array.attrs["dtype"] = dtype_name(column.dtype)
        for (start, stop), block in zip(column.blocks(store.rows), store.blocks(column), strict=True):
            array[start:stop] = _as_numpy(block)


def _file_name(column: Column) -> str:
    """The name with the one character escaped that no file name can hold."""
    return column.name.replace("%", "%25").replace("/", "%2F")


def _dtype(column: Column) -> np.dtype:
    return _as_numpy(torch.empty(0, dtype=column.dtype)).dtype


def _as_numpy(values: Tensor) -> np.ndarray:
    """The same numbers; of what NumPy does not know, the bits."""
    bits = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
    return values.view(bits.get(values.dtype, values.dtype)).numpy()


_WRITERS = {".npz": _npz, ".safetensors": _safetensors, ".zarr": _zarr, ".npy": _npy}
ENDINGS = tuple(_WRITERS)
"""Of the files that `export` writes."""
