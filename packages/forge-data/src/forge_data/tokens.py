"""Token stores: a folder with `tokens.bin`, `docs.idx` and a manifest that says what they are and must be.

`tokens.bin` holds little-endian ids, `docs.idx` the uint64 index at which each document ends, its end token
included.
"""

from __future__ import annotations

import glob
import os
import platform
import secrets
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Literal

import msgspec
import numpy as np
import xxhash
from forge_config import Config

from forge_data.error import DataError

FORMAT = 1
BLOCK_BYTES = 64 << 20
MANIFEST = "manifest.json"
STALE_S = 3600


class Part(Config):
    """One file of a store.

    Attributes:
        bytes: its size.
        digests: xxh3-128 of each block of 64 MiB.
    """

    bytes: int
    digests: list[str]


class Manifest(Config):
    """What a store holds.

    Attributes:
        format: version of this layout.
        dtype: of `tokens.bin`.
        vocab_size: ids are below this.
        tokenizer: digest of the tokenizer.
        num_tokens: ids in `tokens.bin`.
        num_docs: documents.
        tokens: the file `tokens.bin`.
        docs: the file `docs.idx`.
    """

    format: int
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    tokenizer: str
    num_tokens: int
    num_docs: int
    tokens: Part
    docs: Part

    @property
    def digest(self) -> str:
        """Names the content."""
        parts = [*self.tokens.digests, *self.docs.digests, self.tokenizer]
        return xxhash.xxh3_128_hexdigest("/".join(parts).encode())


class TokenStore:
    """A store opened for reading; nothing is read before it is asked for.

    Attributes:
        manifest: what it holds.
        tokens: [num_tokens] memory-mapped ids.
        doc_ends: [num_docs] memory-mapped int64 index at which each document ends.
    """

    def __init__(self, folder: Path | str) -> None:
        """Open a store.

        Raises:
            DataError: it is missing, of another format, or a file has not the size the manifest says.
        """
        self.folder = Path(folder)
        try:
            self.manifest = msgspec.json.decode((self.folder / MANIFEST).read_bytes(), type=Manifest)
        except FileNotFoundError:
            raise DataError(f"{folder} is no token store: it has no {MANIFEST}") from None
        except msgspec.MsgspecError as error:
            raise DataError(f"{self.folder / MANIFEST} cannot be read: {error}") from None
        if self.manifest.format != FORMAT:
            raise DataError(f"{folder} has format {self.manifest.format}; this version reads format {FORMAT}")
        _check_counts(self.folder / MANIFEST, self.manifest)
        self.tokens = self._map("tokens.bin", self.manifest.tokens, self.manifest.dtype)
        # Read as int64: searching uint64 with int64 would convert the whole array to float64 first.
        self.doc_ends = self._map("docs.idx", self.manifest.docs, "int64")

    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        return TokenStore, (self.folder,)

    def _map(self, name: str, part: Part, dtype: str) -> np.ndarray:
        path = self.folder / name
        size = path.stat().st_size if path.exists() else -1
        if size != part.bytes:
            raise DataError(
                f"{path} {f'has {size} bytes' if size >= 0 else 'is missing'}, its manifest says "
                f"{part.bytes}; copy it again or make the store anew"
            )
        little = np.dtype(dtype).newbyteorder("<")
        # A plain view: indexing the memmap class itself costs microseconds a time.
        return np.memmap(path, dtype=little, mode="r").view(np.ndarray) if size else np.empty(0, dtype=little)

    def __len__(self) -> int:
        return self.manifest.num_tokens

    def verify(self) -> None:
        """Read everything and compare it with the manifest.

        Raises:
            DataError: names the file and the first block that differs, or an id outside the vocabulary.
        """
        for name, part in (("tokens.bin", self.manifest.tokens), ("docs.idx", self.manifest.docs)):
            with (self.folder / name).open("rb") as file:
                for index, digest in enumerate(part.digests):
                    if xxhash.xxh3_128_hexdigest(file.read(BLOCK_BYTES)) != digest:
                        raise DataError(f"{self.folder / name} is damaged in block {index} (64 MiB each)")
        self._verify_documents()
        for start in range(0, len(self.tokens), BLOCK_BYTES):
            if int(self.tokens[start : start + BLOCK_BYTES].max()) >= self.manifest.vocab_size:
                raise DataError(
                    f"{self.folder} holds ids outside the vocabulary of {self.manifest.vocab_size}"
                )

    def _verify_documents(self) -> None:
        """Ends rise strictly from above 0 to the number of tokens."""
        last = 0
        for start in range(0, len(self.doc_ends), BLOCK_BYTES):
            ends = self.doc_ends[start : start + BLOCK_BYTES]
            if ends[0] <= last or np.any(ends[1:] <= ends[:-1]):
                raise DataError(f"{self.folder}/docs.idx does not rise from document {start} on")
            last = int(ends[-1])
        if last != len(self.tokens):
            raise DataError(f"{self.folder}/docs.idx ends at token {last}, tokens.bin at {len(self.tokens)}")


def _check_counts(path: Path, manifest: Manifest) -> None:
    """The manifest agrees with itself, so that a dtype or count changed by hand is found at once."""
    for name, part, count, width in (
        ("tokens", manifest.tokens, manifest.num_tokens, np.dtype(manifest.dtype).itemsize),
        ("docs", manifest.docs, manifest.num_docs, 8),
    ):
        if part.bytes != count * width or len(part.digests) != -(-part.bytes // BLOCK_BYTES):
            raise DataError(
                f"{path} contradicts itself: {count} {name} of {width} bytes each are not {part.bytes} bytes "
                f"with {len(part.digests)} digests; make the store anew"
            )


def store_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The narrowest dtype that holds all ids."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class Writer:
    """Context manager that writes a store beside its place and publishes it by one rename when all went well.

    Args:
        folder: where the store will be; must not exist.
        vocab_size: decides the dtype.
        tokenizer: digest of the tokenizer.

    Attributes:
        num_tokens: ids written so far.
        num_docs: documents written so far.
    """

    def __init__(self, folder: Path, vocab_size: int, tokenizer: str) -> None:
        self.folder = folder
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._dtype: Literal["uint16", "uint32"] = store_dtype(vocab_size)
        self._partial = folder.with_name(
            f".{folder.name}.{platform.node()}.{os.getpid()}.{secrets.token_hex(4)}"
        )
        self.num_tokens = 0
        self.num_docs = 0

    def __enter__(self) -> Writer:
        self._sweep()
        self._partial.mkdir(parents=True)
        self._tokens = _HashedFile(self._partial / "tokens.bin")
        self._docs = _HashedFile(self._partial / "docs.idx")
        return self

    def _sweep(self) -> None:
        """Remove what killed processes of this host left of this store, an hour after their last write."""
        own = f".{self.folder.name}.{platform.node()}."
        for left in self.folder.parent.glob(f"{glob.escape(own)}*"):
            pid = left.name[len(own) :].partition(".")[0]
            try:
                newest = max(f.stat().st_mtime for f in [left, *left.iterdir()])
            except OSError:
                continue
            # The process may be alive in a container of its own, where this one cannot see it.
            if time.time() - newest < STALE_S:
                continue
            if pid.isdigit() and not Path("/proc", pid).exists() and Path("/proc/self").exists():
                shutil.rmtree(left, ignore_errors=True)

    def add(self, tokens: np.ndarray, doc_lengths: Iterable[int]) -> None:
        """Append whole documents.

        Args:
            tokens: the ids of all of them, one after the other.
            doc_lengths: how many ids each has, at least one.

        Raises:
            DataError: an id is outside the vocabulary, or the lengths do not add up to the ids.
        """
        lengths = np.asarray(list(doc_lengths), dtype=np.uint64)
        if int(lengths.sum()) != len(tokens) or np.any(lengths == 0):
            raise DataError(
                f"doc_lengths sum to {int(lengths.sum())}; each must be above 0, all fit {len(tokens)} ids"
            )
        if len(tokens) and int(tokens.min()) < 0:
            raise DataError(f"id {int(tokens.min())} is negative")
        if len(tokens) and int(tokens.max()) >= self._vocab_size:
            raise DataError(f"id {int(tokens.max())} is outside the vocabulary of {self._vocab_size}")
        ends = self.num_tokens + np.cumsum(lengths, dtype=np.uint64)
        self._tokens.write(
            np.ascontiguousarray(tokens, dtype=np.dtype(self._dtype).newbyteorder("<")).tobytes()
        )
        self._docs.write(ends.astype("<u8").tobytes())
        self.num_tokens += len(tokens)
        self.num_docs += len(ends)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        parts = self._tokens.close(), self._docs.close()
        if kind is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
            return
        manifest = Manifest(
            format=FORMAT,
            dtype=self._dtype,
            vocab_size=self._vocab_size,
            tokenizer=self._tokenizer,
            num_tokens=self.num_tokens,
            num_docs=self.num_docs,
            tokens=parts[0],
            docs=parts[1],
        )
        with (self._partial / MANIFEST).open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest)))
            file.flush()
            os.fsync(file.fileno())
        try:
            self._partial.rename(self.folder)
            _sync(self.folder.parent)
        except OSError:
            # Another process published the same store first; ours is not needed.
            shutil.rmtree(self._partial, ignore_errors=True)
            if not (self.folder / MANIFEST).exists():
                raise


def _sync(folder: Path) -> None:
    """Have a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _HashedFile:
    """A file that is hashed block by block while it is written."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("wb")
        self._hash = xxhash.xxh3_128()
        self._digests: list[str] = []
        self._in_block = 0
        self._bytes = 0

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        self._bytes += len(view)
        self._file.write(view)
        while len(view):
            taken = view[: BLOCK_BYTES - self._in_block]
            self._hash.update(taken)
            self._in_block += len(taken)
            view = view[len(taken) :]
            if self._in_block == BLOCK_BYTES:
                self._end_block()

    def _end_block(self) -> None:
        self._digests.append(self._hash.hexdigest())
        self._hash.reset()
        self._in_block = 0

    def close(self) -> Part:
        if self._in_block:
            self._end_block()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return Part(bytes=self._bytes, digests=self._digests)
