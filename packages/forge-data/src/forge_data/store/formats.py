"""Token files of other projects. Their dtype is stated by the file or by the user, never guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forge_data.error import DataError
from forge_data.store.chunks import INDEX, Chunk, read_chunks
from forge_data.store.tatm import metadata_of, read_tatm
from forge_data.store.tokens import CHUNK, TokenStore, Writer
from forge_data.tokenizer.tokenizer import Tokenizer, TokenizerConfig

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
RAW_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


PACKED = {
    b"PK\x03\x04": "a zip archive, such as .npz",
    b"\x1f\x8b": "packed by gzip",
    b"\x28\xb5\x2f\xfd": "packed by zstd",
    b"\x89HDF": "HDF5",
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
}
"""What files begin with that hold no raw numbers, whatever dtype is stated."""


class Foreign(NamedTuple):
    """Tokens of another project.

    Attributes:
        tokens: [n] integers, mapped from the file.
        doc_ends: [documents] int64 if the file has them; else None.
        targets: [n] bool if the file says which tokens are targets; else None.
    """

    tokens: np.ndarray
    doc_ends: np.ndarray | None = None
    targets: np.ndarray | None = None


def read_foreign(path: Path, dtype: str | None = None) -> Foreign:
    """Open a token file: Megatron `.bin` with `.idx`, nanoset `.ds`, `.npy`, or raw numbers.

    Args:
        path: the file that holds the tokens.
        dtype: dtype of raw numbers, little-endian; must not contradict the file.

    Raises:
        DataError: the file is missing or damaged, or neither it nor `dtype` states the dtype.

    Source: megatron-core `indexed_dataset.py`; datatrove `DocumentTokenizer` files; NumPy `.npy`.
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    reader: Callable[[Path], Foreign] | None = None
    with path.open("rb") as file:
        head = file.read(6)
    if head == b"\x93NUMPY":
        reader = _npy
    elif path.suffix == ".bin" and path.with_suffix(".idx").is_file():
        reader = _megatron
    elif path.suffix == ".ds":
        reader = _nanoset
    if reader is None:
        return _raw(path, head, dtype)
    found = reader(path)
    if dtype is not None and found.tokens.dtype != np.dtype(dtype).newbyteorder("<"):
        raise DataError(
            f"{path} says that it holds {found.tokens.dtype}; given dtype {dtype!r}: leave it out"
        )
    if found.tokens.dtype.kind not in "iu":
        raise DataError(f"{path} holds {found.tokens.dtype}; expected integers")
    ends = found.doc_ends
    if ends is not None and (
        np.any(np.diff(ends, prepend=0) < 0) or ends[-1:].tolist() != [len(found.tokens)]
    ):
        raise DataError(
            f"the documents of {path} do not rise to its {len(found.tokens)} tokens; copy it again"
        )
    return found


def _raw(path: Path, head: bytes, dtype: str | None) -> Foreign:
    if container := next((what for magic, what in PACKED.items() if head.startswith(magic)), None):
        raise DataError(f"{path} is {container}, no raw numbers; take the tokens out, e.g. as .npy")
    if dtype not in RAW_DTYPES:
        raise DataError(
            f"{path} holds raw numbers and does not say which; given dtype {dtype!r}, expected one of "
            f"{', '.join(RAW_DTYPES)}: its writer knows it"
        )
    return Foreign(_mapped(path, np.dtype(dtype).newbyteorder("<")))


def _mapped(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    size = path.stat().st_size
    if not size or size % dtype.itemsize:
        raise DataError(f"{path} has {size} bytes, which is no whole number of {dtype} above 0")
    return np.memmap(path, dtype, mode="r")


def _npy(path: Path) -> Foreign:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if tokens.ndim != 1:
        raise DataError(f"{path} holds an array of shape {tokens.shape}; expected one dimension")
    return Foreign(tokens)


def _megatron(path: Path) -> Foreign:
    """Its index: magic, version, dtype, counts, then lengths, pointers and first sequences of documents."""
    index = path.with_suffix(".idx")
    raw = index.read_bytes()
    if raw[:9] != MEGATRON_MAGIC or len(raw) < 34:
        raise DataError(f"{index} is no Megatron index: it does not begin with {MEGATRON_MAGIC!r}")
    version, code = int.from_bytes(raw[9:17], "little"), raw[17]
    sequences, marks = (int(n) for n in np.frombuffer(raw, "<u8", 2, 18))
    if version != 1 or code not in MEGATRON_DTYPES:
        raise DataError(f"{index} has version {version} and dtype {code}; expected 1, and integers")
    if len(raw) not in (34 + 12 * sequences + 8 * marks, 34 + 13 * sequences + 8 * marks):
        raise DataError(f"{index} has {len(raw)} bytes, not those of {sequences} sequences and {marks} marks")
    lengths = np.frombuffer(raw, "<i4", sequences, 34).astype(np.int64)
    pointers = np.frombuffer(raw, "<i8", sequences, 34 + 4 * sequences)
    documents = np.frombuffer(raw, "<i8", marks, 34 + 12 * sequences)
    tokens = _mapped(path, np.dtype(MEGATRON_DTYPES[code]))
    ends = np.concatenate([[0], np.cumsum(lengths)])
    if np.any(pointers != ends[:-1] * tokens.dtype.itemsize) or np.any(
        (documents < 0) | (documents > sequences)
    ):
        raise DataError(f"{index} does not list the sequences of {path} one after the other; write it anew")
    return Foreign(tokens, ends[documents[1:]])


def _nanoset(path: Path) -> Foreign:
    """`.ds.metadata` names the bytes of a token after a `|`, `.ds.index` holds the u64 ends of documents.

    `.ds.loss`, where there is one, holds a byte for each token: whether it is a target.
    """
    metadata, index = (path.with_name(path.name + ending) for ending in (".metadata", ".index"))
    try:
        width = int(metadata.read_text().splitlines()[0].rpartition("|")[2])
        dtype = {2: "<u2", 4: "<u4"}[width]
        ends = np.fromfile(index, "<u8").astype(np.int64)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise DataError(
            f"{path} needs {metadata.name} (with 2 or 4 bytes a token) and {index.name}: {error!r}"
        ) from None
    tokens, loss = _mapped(path, np.dtype(dtype)), _loss_beside(path)
    if loss.is_file() and loss.stat().st_size != len(tokens):
        raise DataError(
            f"{loss} has {loss.stat().st_size} bytes; expected one for each of the {len(tokens)} tokens"
        )
    return Foreign(tokens, ends, np.memmap(loss, np.uint8, mode="r") != 0 if loss.is_file() else None)


def _loss_beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.loss")


def import_tokens(
    files: list[Path], out: Path, tokenizer: TokenizerConfig, dtype: str | None = None
) -> TokenStore:
    """Write token files of other projects, one after the other, as a store.

    If a file does not mark its documents, each ends after the end-of-document token, and with the file.

    Args:
        files: see `read_foreign`; folders with an `index.json`: see `read_chunks`, with a `metadata.yaml`:
            see `read_tatm`.
        out: folder of the store; must not exist.
        tokenizer: the tokenizer of the tokens; no id may be outside of its vocabulary.
        dtype: dtype of raw numbers.

    Raises:
        DataError: `out` exists, a file cannot be read, or an id is outside the vocabulary.
    """
    if out.exists():
        raise DataError(f"{out} exists already; remove it or choose another folder")
    built = tokenizer.build()
    masked = any(path.suffix == ".ds" and _loss_beside(path).is_file() for path in files)
    with Writer(out, built.vocab_size, built.digest, masked) as writer:
        for path, tokens, ends, targets in _opened(files, dtype, built):
            are = np.ones(len(tokens), dtype=bool) if masked and targets is None else targets
            ends = _ends_of(tokens, built.eos_id) if ends is None else ends
            for begin, lengths in _portions(np.unique(ends[ends > 0])):
                here = slice(begin, begin + int(lengths.sum()))
                try:
                    writer.add(tokens[here], lengths.tolist(), None if are is None else are[here])
                except DataError as error:
                    raise DataError(
                        f"{path} from token {begin}: {error}; name its own tokenizer and dtype"
                    ) from None
        if not writer.num_tokens:
            raise DataError(f"there are no tokens in {', '.join(map(str, files))}")
    return TokenStore(out)


def _opened(files: list[Path], dtype: str | None, tokenizer: Tokenizer) -> Iterator[Chunk]:
    for path in files:
        metadata = metadata_of(path) if path.is_dir() and not (path / INDEX).is_file() else None
        if metadata is not None:
            yield from read_tatm(metadata, tokenizer, dtype, read_foreign)
        elif path.is_dir():
            yield from read_chunks(path, dtype)
        else:
            yield Chunk(path, *read_foreign(path, dtype))


def _ends_of(tokens: np.ndarray, eos_id: int) -> np.ndarray:
    """[documents] int64: after each end token, and at the end."""
    found = [
        np.flatnonzero(tokens[start : start + CHUNK] == eos_id) + start + 1
        for start in range(0, len(tokens), CHUNK)
    ]
    return np.concatenate([*found, [len(tokens)]]).astype(np.int64)


def _portions(ends: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield starts and lengths of documents, some millions of tokens at a time."""
    first = begin = 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, begin + CHUNK, side="right")))
        yield begin, np.diff(ends[first:last], prepend=begin)
        first, begin = last, int(ends[last - 1])
