"""How are extracted activations read?"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from torch import Tensor

from forge_interp.errors import InterpError
from forge_interp.extraction.formats import ROW_COLUMNS, Contents, format_of
from forge_interp.extraction.merge import missing_ranks, working_folder
from forge_interp.hooks.sites import canonical


class ActivationStore(Mapping[str, Tensor]):
    """Activations on disk, one row per token (or per sample), with the sample that each row came from.

    A mapping from site to [rows, ...] in the dtype that was captured, bfloat16 too. Values are read as they
    are used (`.zarr`: when the site is asked for); writing to them does not change the file. All sites share
    the rows.

    Args:
        path: the file or folder; opened when it is first used, where `open` looks at once.

    Attributes:
        path: the same.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def open(cls, path: str | Path) -> ActivationStore:
        """Open what `extract_representations` wrote: `.npz`, `.safetensors`, `.zarr`, `.npy` or a folder.

        Raises:
            InterpError: there is nothing, it is not whole yet, or something else wrote it.
        """
        store = cls(path)
        _ = store._contents
        return store

    @cached_property
    def _contents(self) -> Contents:
        if not self.path.exists():
            raise InterpError(_absent(self.path))
        metadata, located = _opened(self.path)
        expected = [*metadata["sites"], *(column.name for column in ROW_COLUMNS)]
        found = {n: at for n, at in located.items() if at.rows == metadata["rows"] and at.is_whole}
        if wrong := [name for name in expected if name not in found]:
            raise InterpError(
                f"{self.path} lacks rows of {', '.join(wrong)}; it is damaged: extract it again"
            )
        return metadata, located

    @property
    def metadata(self) -> dict[str, Any]:
        """What was asked: model, sites, pool, dataset, versions; and the number of rows."""
        return self._contents[0]

    @property
    def sites(self) -> tuple[str, ...]:
        """Keys, in the order in which the model computed them."""
        return tuple(self.metadata["sites"])

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.metadata["rows"]

    @property
    def sample_id(self) -> Tensor:
        """[rows] int64: index in the dataset of the sample that each row came from; it never falls."""
        return self._contents[1]["sample_id"].map()

    @property
    def position(self) -> Tensor:
        """[rows] int64: which token of its sample a row is, not counting padding; -1 for a whole sample."""
        return self._contents[1]["position"].map()

    @property
    def token_id(self) -> Tensor:
        """[rows] int64: id of that token; -1 where there is none."""
        return self._contents[1]["token_id"].map()

    def batches(self, rows: int = 4096) -> Iterator[dict[str, Tensor]]:
        """Read all sites in slices of `rows` rows, in order, in memory that the slices alone take.

        Yields:
            {site: [<= rows, ...]}, as the one-pass analyses take it: `moments.update(batch)`.
        """
        if rows < 1:
            raise InterpError(f"rows is {rows}; expected at least 1")
        for start in range(0, self.rows, rows):
            stop = min(start + rows, self.rows)
            yield {site: self._contents[1][site].read(start, stop) for site in self.sites}

    def __getitem__(self, site: str) -> Tensor:
        if (key := canonical(site)) in self.sites:
            return self._contents[1][key].map()
        near = get_close_matches(site, self.sites, n=4, cutoff=0.3) or self.sites[:8]
        raise KeyError(f"{site}: not in {self.path}; there are {', '.join(near)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        return f"ActivationStore({str(self.path)!r})"


def _opened(path: Path) -> Contents:
    try:
        return format_of(path).open(path)
    except InterpError:
        raise
    except (BadZipFile, FileNotFoundError, KeyError, ValueError, struct.error) as error:
        raise InterpError(f"{path} cannot be read ({error}); it is damaged: extract it again") from error


def _absent(path: Path) -> str:
    if not working_folder(path).is_dir():
        return f"{path} does not exist; expected what extract_representations wrote"
    missing = missing_ranks(path)
    return (
        f"{path} is not whole yet: {working_folder(path)} waits for ranks {missing}; run them again to go on"
        if missing
        else f"{path} is not written yet; all ranks are done: call finish_extraction"
    )
