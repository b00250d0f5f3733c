"""How are extracted activations read, and exported for other tools?

The bytes of an export depend on the rows alone: no clock, no file system order.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from forge_interp.errors import InterpError
from forge_interp.extraction.folder import Parts
from forge_interp.extraction.run.parts import (
    ROW_COLUMNS,
    Column,
    as_bytes,
    is_site,
    replacing,
)
from forge_interp.hooks.sites import key_of


class ActivationStore(Mapping[str, Tensor]):
    """Activations of a dataset, one row per token (or per sample), with the sample of each row.

    A mapping from site to [rows, ...] in the captured dtype. All sites share the rows. Access to a site reads
    it into memory; `read` and `batches` read parts of it. The folder `path` (None: the store is in memory) is
    opened at the first use; `open` opens it at once.
    """

    def __init__(self, path: str | Path | None) -> None:
        self.path = None if path is None else Path(path)
        self._parts = Parts(self.path or Path(), {})
        self._held: dict[str, Tensor] = {}

    @classmethod
    def open(cls, path: str | Path) -> ActivationStore:
        """Open the folder that `extract_representations` wrote; InterpError if it is not complete."""
        store = cls(path)
        _ = store.metadata
        return store

    @classmethod
    def of(cls, rows: Mapping[str, Tensor]) -> ActivationStore:
        """Make a store in memory of sites, `sample_id`, `position` and `token_id`."""
        store = cls(None)
        store._held = dict(rows)
        return store

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The request (model, sites, pool, dataset, versions) and the number of rows."""
        if self.path is None:
            sites = [name for name in self._held if is_site(name)]
            return {"sites": sites, "rows": len(next(iter(self._held.values())))}
        return self._parts.whole()

    @property
    def sites(self) -> tuple[str, ...]:
        """Keys of sites, in the order in which the model computed them."""
        return tuple(self.metadata["sites"])

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.metadata["rows"]

    @property
    def columns(self) -> list[Column]:
        """The sites, then the three ids, then the kept inputs, with dtype and shape of a row."""
        if self.path is None:
            return [Column(name, rows.dtype, tuple(rows.shape[1:])) for name, rows in self._held.items()]
        dtypes, shapes = self.metadata["dtypes"], self.metadata["shapes"]
        names = dict.fromkeys([*self.sites, *ROW_COLUMNS, *sorted(dtypes)])
        return [Column(name, getattr(torch, dtypes[name]), tuple(shapes[name])) for name in names]

    @cached_property
    def sample_id(self) -> Tensor:
        """[rows] int64: index in the dataset of each row's sample; it never falls."""
        return self._read("sample_id", 0, self.rows)

    @cached_property
    def position(self) -> Tensor:
        """[rows] int64: index of the row's token in its sample, without padding; -1 for a whole sample."""
        return self._read("position", 0, self.rows)

    @cached_property
    def token_id(self) -> Tensor:
        """[rows] int64: id of the row's token; -1 where there is none."""
        return self._read("token_id", 0, self.rows)

    def kept(self, name: str) -> Tensor:
        """Return [rows], the value of an input in `keep` for each row; InterpError if it was not kept."""
        names = [c.name for c in self.columns if not is_site(c.name) and c.name not in ROW_COLUMNS]
        if name not in names:
            raise InterpError(
                f"{name!r} was not kept; expected one of {', '.join(names) or 'none'}: extract with keep="
            )
        return self._read(name, 0, self.rows)

    def read(self, site: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows [start, stop) of a site; needs no more memory than these rows."""
        stop = self.rows if stop is None else min(stop, self.rows)
        return self._read(key_of(site, self.sites), start, stop)

    def blocks(self, column: Column) -> Iterator[Tensor]:
        """Yield all rows of one of the `columns` in pieces of a few MiB."""
        return (self._read(column.name, start, stop) for start, stop in column.blocks(self.rows))

    def batches(self, rows: int = 4096) -> Iterator[dict[str, Tensor]]:
        """Yield all sites in slices {site: [<= rows, ...]}, in order, for `moments.update(batch)`."""
        if rows < 1:
            raise InterpError(f"rows is {rows}; expected at least 1")
        for start in range(0, self.rows, rows):
            yield {site: self._read(site, start, min(start + rows, self.rows)) for site in self.sites}

    def export(self, path: str | Path) -> None:
        """Export everything for NumPy: `.npz`, or `.npy` of one site.

        NumPy knows no bfloat16: its bits are stored as uint16. The parts themselves are safetensors files.
        """
        path = Path(path)
        if path.suffix not in _WRITERS:
            raise InterpError(f"path is {str(path)!r}; expected a name that ends in {', '.join(_WRITERS)}")
        _WRITERS[path.suffix](self, path)

    def _read(self, name: str, start: int, stop: int) -> Tensor:
        if self.path is None:
            return self._held[name][start:stop]
        pieces, end = [], 0
        for number, part in enumerate(self.metadata["parts"]):
            first, end = end, end + part["rows"]
            if first >= stop:
                break
            if start < end:
                with safe_open(self._parts.path(number), "pt") as file:
                    pieces.append(file.get_slice(name)[max(start - first, 0) : stop - first])
        if not pieces:
            column = next(column for column in self.columns if column.name == name)
            return torch.empty(0, *column.shape, dtype=column.dtype)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def __getitem__(self, site: str) -> Tensor:
        return self.read(site)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        return f"ActivationStore({str(self.path)!r})"


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
            "one: take .npz"
        )
    with replacing(path) as file:
        _write_array(file, store, store.columns[0])


def _write_array(file: Any, store: ActivationStore, column: Column) -> None:
    kind = np.lib.format.dtype_to_descr(_dtype(column))
    fields = {"descr": kind, "fortran_order": False, "shape": (store.rows, *column.shape)}
    np.lib.format.write_array_header_1_0(file, fields)
    for block in store.blocks(column):
        file.write(as_bytes(block))


def _file_name(column: Column) -> str:
    """Return the column's name with `/` escaped, which no file name can hold."""
    return column.name.replace("%", "%25").replace("/", "%2F")


def _dtype(column: Column) -> np.dtype:
    return _as_numpy(torch.empty(0, dtype=column.dtype)).dtype


def _as_numpy(values: Tensor) -> np.ndarray:
    """Return the same numbers; for dtypes that NumPy lacks, the bits."""
    bits = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
    return values.view(bits.get(values.dtype, values.dtype)).numpy()


_WRITERS = {".npz": _npz, ".npy": _npy}
ENDINGS = tuple(_WRITERS)
"""File endings that `export` writes."""
