"""The pieces of documents in each row of a packing: planned once, kept in the cache, read in place.

The plan is made for `WINDOW` documents at a time. Planned windows stay when the process is killed.
"""

from __future__ import annotations

import secrets
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from forge_config import Config

from forge_data.error import DataError
from forge_data.locks import locked
from forge_data.order.order import key
from forge_data.packing.layouts import Layout, layouts
from forge_data.store.blocks import HashedFile, Part, VerifiedFile, sync_and_close
from forge_data.store.tokens import MANIFEST, TokenStore

VERSION = 1
"""Another number when the same documents would be laid out in another way."""

WINDOW = 1 << 20
"""Documents that are planned together: bounds the memory of planning, and what a kill loses."""

FILES = {"starts": "<i8", "lengths": "<u4", "rows": "<i8"}


class Statistics(Config):
    """What a packing does to the documents of a source.

    Attributes:
        sequences: rows of T + 1 tokens.
        documents: documents of the source.
        long: documents that are longer than a row.
        split: documents that lie in several rows, or of which a part is left out.
        padding: tokens of rows without content.
        left_out: tokens of documents that are in no row.
        capacity: tokens of all rows.
    """

    sequences: int
    documents: int
    long: int
    split: int
    padding: int
    left_out: int
    capacity: int

    def __str__(self) -> str:
        documents = max(1, self.documents)
        left_out = f", {self.left_out:,} tokens left out" if self.left_out else ""
        return (
            f"{self.sequences:,} sequences, {self.padding / max(1, self.capacity):.3%} padding, "
            f"{self.split:,} of {self.documents:,} documents cut ({self.split / documents:.1%}; "
            f"{self.long:,} are longer than a sequence){left_out}"
        )


class _Manifest(Config):
    starts: Part
    lengths: Part
    rows: Part
    statistics: Statistics


class RowIndex:
    """The pieces of each row, mapped from files whose blocks are checked at their first access.

    Attributes:
        folder: its folder.
        statistics: statistics of all rows.

    Raises:
        DataError: it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=_Manifest)
        except (OSError, msgspec.MsgspecError) as error:
            raise DataError(f"the plan {folder} cannot be read: {error}; remove it to plan anew") from None
        self.statistics = manifest.statistics
        self._files = {
            name: VerifiedFile(folder / f"{name}.bin", getattr(manifest, name), np.dtype(dtype))
            for name, dtype in FILES.items()
        }

    def __reduce__(self) -> tuple[type[RowIndex], tuple[Path]]:
        return RowIndex, (self.folder,)

    def __len__(self) -> int:
        return self.statistics.sequences

    def require_files(self) -> None:
        """See `VerifiedFile.require_size`."""
        for file in self._files.values():
            file.require_size()

    def pieces(self, rows: np.ndarray) -> Layout:
        """Return the pieces of some rows.

        Args:
            rows: [n] int64.

        Raises:
            DataError: the plan is damaged.
        """
        first, last = self._files["rows"].rows(rows, 2).T
        counts = last - first
        ends = np.cumsum(counts)
        at = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - (ends - counts), counts)
        starts, lengths = (self._files[name].rows(at, 1)[:, 0] for name in ("starts", "lengths"))
        return Layout(starts, lengths.astype(np.int64), ends)


def open_row_index(store: TokenStore, packing: str, max_tokens: int, cache: Path) -> RowIndex:
    """Open the rows of a store, planned first if need be, by one process while the others wait.

    Args:
        store: the documents.
        packing: a name of `layouts`.
        max_tokens: T.
        cache: folder of files that can be made again.

    Raises:
        DataError: the plan cannot be written or read.
    """
    named = key("rows", VERSION, packing, max_tokens, store.manifest.docs.digest, WINDOW)
    folder = cache / "rows" / f"{named:016x}"
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(folder.with_suffix(".lock"), f"the packing of {store.folder} is planned"):
                if not folder.exists():
                    _plan(store, layouts[packing], max_tokens, folder)
        except OSError as error:
            if folder.exists():
                return RowIndex(folder)
            raise DataError(
                f"the packing of {store.folder} cannot be kept in {cache}: {error}; set data.cache_dir or "
                "$FORGE_CACHE"
            ) from None
    return RowIndex(folder)


Lay = Callable[[np.ndarray, np.ndarray, int], Layout]


def _plan(store: TokenStore, lay: Lay, max_tokens: int, folder: Path) -> None:
    """Plan each window, then publish all by one rename."""
    partial = folder.with_suffix(".partial")
    partial.mkdir(exist_ok=True)
    windows = -(-len(store.doc_ends) // WINDOW)
    for number in range(windows):
        if _planned(partial, number) is None:
            _keep(lay(*_documents(store, number), max_tokens), partial / f"{number}.npz")
    joined = partial / f"whole.{secrets.token_hex(4)}"
    joined.mkdir()
    _join([partial / f"{number}.npz" for number in range(windows)], store, max_tokens, joined)
    try:
        joined.rename(folder)
    except OSError:
        # Another process published the same plan first; ours is not needed.
        if not (folder / MANIFEST).exists():
            raise
    shutil.rmtree(partial, ignore_errors=True)


def _documents(store: TokenStore, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of the documents of a window."""
    first = window * WINDOW
    stops = store.doc_ends[first : first + WINDOW]
    starts = np.concatenate([store.doc_ends[first - 1 : first] if first else [0], stops[:-1]])
    return starts, stops - starts


def _keep(layout: Layout, path: Path) -> None:
    written = path.with_suffix(f".{secrets.token_hex(4)}.tmp.npz")
    np.savez(written, **layout._asdict())
    written.replace(path)


def _planned(partial: Path, number: int) -> Layout | None:
    """Return a window that an earlier process planned; None if none did, or it is damaged."""
    try:
        return _window(partial / f"{number}.npz")
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _window(path: Path) -> Layout:
    with np.load(path) as found:
        return Layout(found["starts"], found["lengths"], found["ends"])


def _join(windows: list[Path], store: TokenStore, max_tokens: int, joined: Path) -> None:
    files = {name: HashedFile(joined / f"{name}.bin") for name in FILES}
    files["rows"].write(np.zeros(1, FILES["rows"]).tobytes())
    pieces = sequences = taken = long = split = 0
    for number, path in enumerate(windows):
        layout, (starts, lengths) = _window(path), _documents(store, number)
        found = {"starts": layout.starts, "lengths": layout.lengths, "rows": layout.ends + pieces}
        for name, values in found.items():
            files[name].write(np.ascontiguousarray(values, FILES[name]).tobytes())
        pieces, sequences = pieces + len(layout.starts), sequences + len(layout.ends)
        taken += int(layout.lengths.sum())
        long += int(np.count_nonzero(lengths > max_tokens + 1))
        order = np.argsort(layout.starts)
        first = order[np.searchsorted(layout.starts[order], starts)]
        split += int(np.count_nonzero(layout.lengths[first] != lengths))
    documents, capacity = len(store.doc_ends), sequences * (max_tokens + 1)
    statistics = Statistics(
        sequences=sequences,
        documents=documents,
        long=long,
        split=split,
        padding=capacity - taken,
        left_out=len(store) - taken + pieces - documents,  # pieces of one document share a token
        capacity=capacity,
    )
    parts = {name: file.finish() for name, file in files.items()}
    manifest = _Manifest(**parts, statistics=statistics)
    with (joined / MANIFEST).open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest)))
        sync_and_close(file)
