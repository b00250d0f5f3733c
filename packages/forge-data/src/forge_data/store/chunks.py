"""Token folders of other projects with an `index.json` of their files: litData chunks and MosaicML MDS."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forge_data.error import DataError

INDEX = "index.json"

LITDATA_DTYPES = {
    11: "u1",
    12: "i1",
    13: "<i2",
    14: "<i2",
    15: "<i4",
    16: "<i4",
    17: "<i8",
    18: "<i8",
    20: "<u2",
}
"""litData numbers the integers of torch."""


class Chunk(NamedTuple):
    """Tokens of one file.

    Attributes:
        path: the file.
        tokens: [n] integers.
        doc_ends: [documents] int64 if the file has them; else None.
        targets: [n] bool if the file says which tokens are targets; else None.
    """

    path: Path
    tokens: np.ndarray
    doc_ends: np.ndarray | None
    targets: np.ndarray | None = None


def read_chunks(folder: Path, dtype: str | None = None) -> Iterator[Chunk]:
    """Read the files of the `index.json` of a folder, in its order.

    Args:
        folder: the folder.
        dtype: dtype of MDS columns of raw bytes, which do not say it; must not contradict a file.

    Raises:
        DataError: the folder has neither format, a file is damaged, or the dtype is unknown.

    Source: litdata `streaming/writer.py` and `item_loader.py`; mosaicml-streaming `base/format/mds`.
    """
    if not (folder / INDEX).is_file():
        kinds = Counter("".join(file.suffixes[-2:]) for file in folder.iterdir() if file.is_file())
        listed = ", ".join(f"{count} {kind or 'without an ending'}" for kind, count in kinds.most_common(5))
        raise DataError(
            f"{folder} has no {INDEX}, so it holds neither litData chunks nor MDS, and no metadata.yaml of "
            "tatm; it has files: "
            f"{listed or 'none'}. Name token files one by one, e.g. {folder}/*.npy; "
            "text is read by `forge-data tokenize`"
        )
    try:
        index = json.loads((folder / INDEX).read_bytes())
        if "chunks" in index:
            given, chunks = index["config"]["data_format"], index["chunks"]
            stated = _litdata_dtype(folder, given)
            _require_dtype(folder, dtype, stated)
            yield from (_litdata(folder / c["filename"], stated, int(c["chunk_size"]), c) for c in chunks)
        elif "shards" in index:
            yield from (_mds(folder, shard, dtype) for shard in index["shards"])
        else:
            raise KeyError("chunks or shards")
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{folder} is neither litData chunks nor MDS: {INDEX}: {error!r}") from None


def _require_dtype(path: Path, given: str | None, stated: np.dtype[Any]) -> None:
    if given is not None and stated != np.dtype(given).newbyteorder("<"):
        raise DataError(f"{path} says that it holds {stated}; given dtype {given!r}: leave it out")


def _litdata_dtype(folder: Path, data_format: list[str]) -> np.dtype[Any]:
    kind, _, number = data_format[0].partition(":")
    if len(data_format) != 1 or kind != "no_header_tensor" or int(number or -1) not in LITDATA_DTYPES:
        raise DataError(
            f"{folder} holds {data_format}; expected token chunks: one `no_header_tensor` of integers"
        )
    return np.dtype(LITDATA_DTYPES[int(number)])


def _litdata(path: Path, dtype: np.dtype[Any], items: int, stated: dict[str, Any]) -> Chunk:
    """u32 number of items, u32 byte offsets of each and of the end, then the ids; an item is a document."""
    raw, offsets = _header(path, items)
    tokens = _ids(path, raw[offsets[0] :], dtype)
    ends = (offsets[1:] - offsets[0]) // dtype.itemsize
    if stated.get("dim") not in (None, len(tokens)) or offsets[-1] != len(raw):
        raise DataError(f"{path} holds {len(tokens)} tokens, {INDEX} says {stated.get('dim')}; copy it again")
    return Chunk(path, tokens, ends)


def _header(path: Path, items: int) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of a file, mapped, and the [items + 1] int64 offsets of its items."""
    if not path.is_file():
        raise DataError(f"{path} is missing; copy the whole folder, and unpack its files if they are packed")
    raw = np.memmap(path, np.uint8, mode="r")
    stated = int(raw[:4].view("<u4")[0]) if len(raw) >= 4 else -1
    if stated != items or len(raw) < 4 * (items + 2):
        raise DataError(f"{path} holds {stated} items, {INDEX} says {items}; copy it again")
    offsets = raw[4 : 4 * (items + 2)].view("<u4").astype(np.int64)
    if offsets[0] < 4 * (items + 2) or np.any(np.diff(offsets) < 0) or offsets[-1] > len(raw):
        raise DataError(f"the items of {path} do not follow one another within it; copy it again")
    return raw, offsets


def _ids(path: Path, raw: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    if len(raw) % dtype.itemsize:
        raise DataError(f"{path} holds {len(raw)} bytes of ids, no whole number of {dtype}")
    return np.frombuffer(raw.tobytes() if len(raw) else b"", dtype)


def _mds(folder: Path, shard: dict[str, Any], dtype: str | None) -> Chunk:
    """Items are samples: u32 sizes of columns without a fixed one, then the columns. Documents cross them."""
    path = folder / shard["raw_data"]["basename"]
    names, sizes = shard["column_names"], shard["column_sizes"]
    if shard.get("compression") is not None and not path.is_file():
        raise DataError(f"{path} is packed ({shard['compression']}); unpack the folder first")
    if "tokens" not in names:
        raise DataError(f"{path} has no column 'tokens'; it has {', '.join(names)}")
    column = names.index("tokens")
    encoding = shard["column_encodings"][column]
    stated = _mds_dtype(path, encoding, dtype)
    raw, offsets = _header(path, int(shard["samples"]))
    found = [_column(raw[a:b], sizes, column) for a, b in itertools.pairwise(offsets.tolist())]
    if encoding.startswith("ndarray") and encoding.count(":") == 1:
        found = [_after_shape(path, values, stated) for values in found]
    return Chunk(path, _ids(path, np.concatenate(found), stated), None)


def _mds_dtype(path: Path, encoding: str, dtype: str | None) -> np.dtype[Any]:
    kind, _, rest = encoding.partition(":")
    name, _, _ = rest.partition(":")
    if kind == "bytes" and dtype is not None:
        return np.dtype(dtype).newbyteorder("<")
    if kind == "ndarray" and name:
        stated = np.dtype(name).newbyteorder("<")
        _require_dtype(path, dtype, stated)
        return stated
    raise DataError(
        f"{path} holds tokens as {encoding!r}; expected 'ndarray' with a dtype, or 'bytes' and a "
        "--dtype: its writer knows it"
    )


def _after_shape(path: Path, raw: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """The values of an array with its shape before them: dimensions * 4 + size of each, then each of them."""
    head = int(raw[0]) if len(raw) else 0
    dimensions, width = head >> 2, 1 << head % 4
    shape = raw[1 : 1 + dimensions * width].view(f"<u{width}")
    values = raw[1 + dimensions * width :]
    if not dimensions or len(values) != int(np.prod(shape, dtype=np.int64)) * dtype.itemsize:
        raise DataError(f"{path} holds an array whose shape does not fit its {len(values)} bytes")
    return values


def _column(sample: np.ndarray, sizes: list[int | None], column: int) -> np.ndarray:
    """The bytes of a column of a sample."""
    free = [n for n, size in enumerate(sizes) if size is None]
    lengths = dict(zip(free, sample[: 4 * len(free)].view("<u4").tolist(), strict=True))
    begin = 4 * len(free) + sum(size or lengths[n] for n, size in enumerate(sizes[:column]))
    return sample[begin : begin + (sizes[column] or lengths[column])]
