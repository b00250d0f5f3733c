"""How are extracted activations read?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import Tensor

from forge_interp.columns import Located
from forge_interp.errors import InterpError
from forge_interp.formats import ROW_COLUMNS, format_of
from forge_interp.merge import missing_ranks, working_folder


class ActivationStore(Mapping[str, Tensor]):
    """Activations on disk, one row per token (or per sample), with the sample that each row came from.

    A mapping from site to [rows, ...] in the dtype that was captured, bfloat16 too. Values are read as they
    are used (`.zarr`: when the site is asked for); writing to them does not change the file. All sites share
    the rows.

    Attributes:
        path: the file or folder.
        sites: keys, in the order in which the model computed them.
        rows: number of rows.
        metadata: what was asked: model, sites, pool, dataset, versions.
    """

    def __init__(self, path: Path, metadata: Mapping[str, Any], located: Mapping[str, Located]) -> None:
        self.path = path
        self.metadata = dict(metadata)
        self.sites: tuple[str, ...] = tuple(metadata["sites"])
        self.rows: int = metadata["rows"]
        self._located = dict(located)

    @classmethod
    def open(cls, path: str | Path) -> ActivationStore:
        """Open what `extract_representations` wrote: `.npz`, `.safetensors`, `.zarr`, `.npy` or a folder.

        Raises:
            InterpError: there is nothing, it is not whole yet, or something else wrote it.
        """
        path = Path(path)
        if not path.exists():
            raise InterpError(_absent(path))
        metadata, located = format_of(path).open(path)
        expected = [*metadata["sites"], *(column.name for column in ROW_COLUMNS)]
        wrong = [name for name in expected if name not in located or located[name].rows != metadata["rows"]]
        if wrong:
            raise InterpError(f"{path} lacks rows of {', '.join(wrong)}; it is damaged: extract it again")
        return cls(path, metadata, located)

    @property
    def sample_id(self) -> Tensor:
        """[rows] int64: index in the dataset of the sample that each row came from; it never falls."""
        return self._located["sample_id"].map()

    @property
    def position(self) -> Tensor:
        """[rows] int64: which token of its sample a row is, not counting padding; -1 for a whole sample."""
        return self._located["position"].map()

    @property
    def token_id(self) -> Tensor:
        """[rows] int64: id of that token; -1 where there is none."""
        return self._located["token_id"].map()

    def batches(self, rows: int = 4096) -> Iterator[dict[str, Tensor]]:
        """Read all sites in slices of `rows` rows, in order, in memory that the slices alone take.

        Yields:
            {site: [<= rows, ...]}, as the one-pass analyses take it: `moments.update(batch)`.
        """
        if rows < 1:
            raise InterpError(f"rows is {rows}; expected at least 1")
        for start in range(0, self.rows, rows):
            stop = min(start + rows, self.rows)
            yield {site: self._located[site].read(start, stop) for site in self.sites}

    def __getitem__(self, site: str) -> Tensor:
        key = site.removesuffix("#0")
        for name in (key, f"{key}:out"):
            if name in self.sites:
                return self._located[name].map()
        near = get_close_matches(site, self.sites, n=4, cutoff=0.3) or self.sites[:8]
        raise KeyError(f"{site}: not in {self.path}; there are {', '.join(near)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        return f"ActivationStore({str(self.path)!r}, {self.rows} rows, sites: {', '.join(self.sites)})"


def _absent(path: Path) -> str:
    if not working_folder(path).is_dir():
        return f"{path} does not exist; expected what extract_representations wrote"
    missing = missing_ranks(path)
    return (
        f"{path} is not whole yet: {working_folder(path)} waits for ranks {missing}; run them again to go on"
        if missing
        else f"{path} is not written yet; all ranks are done: call finish_extraction"
    )
