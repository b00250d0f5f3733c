"""Which activations does an autoencoder train on, in which order?

Rows come in windows: units of neighbouring rows, drawn without replacement in each epoch, read one window at
a time and shuffled inside of it. A window depends on the seed and its number alone, so that a run can
continue anywhere without reading earlier windows, and processes can share the work of one window.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forge_interp.errors import InterpError, check_kind
from forge_interp.extraction.extract import extract_representations
from forge_interp.extraction.run.identity import model_identity, names_of
from forge_interp.extraction.run.parts import dump
from forge_interp.extraction.samples import Names, open_dataset
from forge_interp.extraction.store import ActivationStore
from forge_interp.hooks.sites import key_of


def generator(*seeds: int) -> torch.Generator:
    """Make a random generator seeded by these numbers."""
    state = np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state))


class Rows:
    """Inputs and targets [rows, D] of an autoencoder, in `windows` of units; each epoch has its own order."""

    def __init__(self, sites: list[str], unit: int, per_window: int, rows: int, seed: int) -> None:
        if not rows >= 1 or not 1 <= unit <= per_window:
            raise InterpError(
                f"{rows} rows or samples, windows of {per_window} in units of {unit}; expected at least one, "
                "and windows of at least one unit"
            )
        self._sites, self._unit, self._rows, self._seed = sites, unit, rows, seed
        self._per_window, self._total = per_window // unit, -(-rows // unit)
        self.windows = -(-self._total // self._per_window)

    def share(self, number: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
        """Return this rank's share of the rows of window `number`; the shares in order make the window."""
        order = torch.randperm(self._total, generator=generator(self._seed, number // self.windows)).tolist()
        start = number % self.windows * self._per_window
        units = order[start : start + self._per_window]
        mine = units[len(units) * rank // size : len(units) * (rank + 1) // size]
        made = self._read([range(self._rows)[unit * self._unit :][: self._unit] for unit in mine])
        return made[0], made[-1]

    def identity(self) -> dict[str, Any]:
        """Return all that determines the rows; a run that continues compares it."""
        return {"sites": self._sites, "window": [self._per_window, self._unit, self._total, self._seed]}

    def _read(self, units: list[range]) -> list[Tensor]:
        """Read the rows of units at each site."""
        raise NotImplementedError


class StoreRows(Rows):
    """Rows of an `ActivationStore`: `site`, and for a transcoder `target`.

    `window_rows` are in memory at a time, read in blocks of `block_rows` neighbours. InterpError where there
    are no rows; KeyError where the store has no such site.
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
        check_kind("store", store, ActivationStore, "an ActivationStore: ActivationStore.open(folder)")
        sites = list(dict.fromkeys(key_of(name, store.sites) for name in (site, target or site)))
        super().__init__(sites, block_rows, window_rows, store.rows, seed)
        self._store = store

    def identity(self) -> dict[str, Any]:
        """See `Rows`."""
        index = dump({k: v for k, v in self._store.metadata.items() if k != "parts"})
        return super().identity() | {"rows": self._store.rows, "store": zlib.crc32(index.encode())}

    def _read(self, units: list[range]) -> list[Tensor]:
        cuts = [(0, 0), *((unit.start, unit.stop) for unit in units)]
        return [torch.cat([self._store.read(site, *cut) for cut in cuts]).flatten(1) for site in self._sites]


class ModelRows(Rows):
    """Rows that a model computes when needed, of the valid tokens of a sequence of samples.

    `options` are passed to `extract_representations`, which computes the rows (`tokens`, `mask`, `pad_id`,
    `forward`, `select`, `pool`, `dtype`). InterpError where the dataset is no sequence of samples.
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
        check_kind("model", model, nn.Module, "an nn.Module")
        if not hasattr(dataset, "__getitem__") or isinstance(dataset, dict):
            raise InterpError(f"the dataset is a {type(dataset).__name__}; expected a sequence of samples")
        sites = list(dict.fromkeys([site, target or site]))
        super().__init__(sites, batch_size, samples_per_window, len(dataset), seed)
        names = Names(options.get("tokens", "input_ids"), options.get("mask", "attention_mask"))
        self._model, self._dataset, self._options = model, dataset, options
        self._fingerprint = open_dataset(dataset, batch_size, names).fingerprint()

    def identity(self) -> dict[str, Any]:
        """See `Rows`."""
        options = {key: names_of(x) if callable(x) else str(x) for key, x in self._options.items()}
        data = {"dataset": self._fingerprint, "model": model_identity(self._model), "options": options}
        return super().identity() | data

    def _read(self, units: list[range]) -> list[Tensor]:
        samples = [self._dataset[i] for unit in units for i in unit]
        if not samples:
            return [torch.empty(0, 0)]
        given = {"batch_size": self._unit, "rank": 0, "world_size": 1, "progress": False, **self._options}
        store = extract_representations(self._model, samples, self._sites, **given)
        return [rows.flatten(1) for rows in store.values()]
