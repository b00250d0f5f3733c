"""Which activations does an autoencoder see, in which order?

Rows come in windows: units of neighbouring rows, drawn without replacement in each epoch, read one window at
a time and shuffled inside of it. A window is a function of the seed and its number, so that a run goes on
anywhere without reading what was before, and processes can share the work of one window.
"""

from __future__ import annotations

import zlib
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from forge_interp.errors import InterpError, check_kind
from forge_interp.extraction.extract import extract_representations
from forge_interp.extraction.run.identity import model_identity
from forge_interp.extraction.run.parts import dump
from forge_interp.extraction.samples import Names, open_dataset
from forge_interp.extraction.store import ActivationStore
from forge_interp.hooks.sites import key_of


class Rows(Protocol):
    """Inputs and targets [rows, D] of an autoencoder, by window."""

    def share(self, number: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
        """Its share of the rows of window `number`; all shares in order are the window."""
        ...

    def identity(self) -> dict[str, Any]:
        """What determines the rows, to be compared when a run goes on."""
        ...


def generator(*seeds: int) -> torch.Generator:
    """A generator for these numbers."""
    state = np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state))


def _units(number: int, rank: int, size: int, total: int, per_window: int, seed: int) -> list[int]:
    """The units of a window that are one process's share."""
    windows = -(-total // per_window)
    order = torch.randperm(total, generator=generator(seed, number // windows)).tolist()
    start = number % windows * per_window
    mine = order[start : start + per_window]
    return mine[len(mine) * rank // size : len(mine) * (rank + 1) // size]


class StoreRows:
    """Rows of an `ActivationStore`: `site`, and for a transcoder `target`.

    `window_rows` are in memory at a time, read in blocks of `block_rows` neighbours.
    """

    def __init__(
        self,
        store: ActivationStore,
        site: str,
        target: str | None = None,
        *,
        window_rows: int = 1 << 17,
        block_rows: int = 256,
        seed: int = 0,
    ) -> None:
        """InterpError where the store has no rows; KeyError where it has no such site."""
        check_kind("store", store, ActivationStore, "an ActivationStore: ActivationStore.open(folder)")
        if not store.rows or block_rows < 1 or window_rows < block_rows:
            raise InterpError(
                f"{store.rows} rows, window_rows={window_rows}, block_rows={block_rows}; expected at least "
                "one row, and windows of at least one block"
            )
        self._store, self._block, self._seed = store, block_rows, seed
        self._sites = [key_of(name, store.sites) for name in (site, target or site)]
        self._per_window = window_rows // block_rows

    def share(self, number: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
        """See `Rows`."""
        total = -(-self._store.rows // self._block)
        units = _units(number, rank, size, total, self._per_window, self._seed)
        x, y = (self._read(site, units) for site in self._sites)
        return x, x if self._sites[0] == self._sites[1] else y

    def identity(self) -> dict[str, Any]:
        """See `Rows`."""
        index = dump({k: v for k, v in self._store.metadata.items() if k != "parts"})
        window = [self._per_window, self._block, self._seed]
        return {
            "sites": self._sites,
            "rows": self._store.rows,
            "store": zlib.crc32(index.encode()),
            "window": window,
        }

    def _read(self, site: str, units: list[int]) -> Tensor:
        empty = self._store.read(site, 0, 0)
        pieces = [self._store.read(site, unit * self._block, (unit + 1) * self._block) for unit in units]
        return torch.cat([empty, *pieces]).flatten(1)


class ModelRows:
    """Rows that a model computes as they are needed, of the valid tokens of `dataset`.

    `dataset` is a sequence of samples; `options` are those of `extract_representations`, which computes the
    rows (`tokens`, `mask`, `pad_id`, `forward`, `select`, `pool`, `dtype`).
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Any,
        site: str,
        target: str | None = None,
        *,
        samples_per_window: int = 256,
        batch_size: int = 8,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """InterpError where the dataset is no sequence of samples."""
        names = Names(
            *(
                options.get(key, default)
                for key, default in (("tokens", "input_ids"), ("mask", "attention_mask"))
            )
        )
        check_kind("model", model, nn.Module, "an nn.Module")
        if (
            not hasattr(dataset, "__getitem__")
            or isinstance(dataset, dict)
            or samples_per_window < batch_size
        ):
            raise InterpError(
                f"the dataset is a {type(dataset).__name__}, samples_per_window={samples_per_window}; "
                f"expected a sequence of samples, and windows of at least a batch of {batch_size}"
            )
        self._model, self._dataset, self._batch, self._seed = model, dataset, batch_size, seed
        self._sites, self._options = [site, target or site], options
        self._per_window = samples_per_window // batch_size
        self._fingerprint = open_dataset(dataset, batch_size, names).fingerprint()

    def share(self, number: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
        """See `Rows`."""
        total = -(-len(self._dataset) // self._batch)
        units = _units(number, rank, size, total, self._per_window, self._seed)
        picked = range(len(self._dataset))
        samples = [
            self._dataset[i] for unit in units for i in picked[unit * self._batch : (unit + 1) * self._batch]
        ]
        if not samples:
            return torch.empty(0, 0), torch.empty(0, 0)
        given = {"batch_size": self._batch, "rank": 0, "world_size": 1, "progress": False, **self._options}
        store = extract_representations(self._model, samples, dict.fromkeys(self._sites), **given)
        x, y = (store[site].flatten(1) for site in self._sites)
        return x, x if self._sites[0] == self._sites[1] else y

    def identity(self) -> dict[str, Any]:
        """See `Rows`."""
        window = [self._per_window, self._batch, self._seed]
        options = sorted(map(str, self._options.items()))
        data = {"dataset": self._fingerprint, "model": model_identity(self._model), "options": options}
        return {"sites": self._sites, "window": window} | data
