"""Files with digests of their blocks: hashed while they are written, checked when a block is first read.

The list of the xxh3-64 digests of the blocks of a file lies beside it; the owner of the file keeps the digest
of that list.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash
from forge_config import Config
from numpy.lib.stride_tricks import sliding_window_view

from forge_data.error import DataError

BLOCK_BYTES = 64 << 10
DIGESTS = ".xxh3"
"""Ending of the list of digests of a file."""


class Part(Config):
    """One file of a store.

    Attributes:
        bytes: its size.
        digest: xxh3-128 of the list of the digests of its blocks of 64 KiB.
    """

    bytes: int
    digest: str


class VerifiedFile:
    """A memory-mapped file whose blocks are compared with their digests at their first access.

    Attributes:
        values: the whole file as an array, unchecked.

    Raises:
        DataError: it is missing, cannot be mapped or has another size, or the list of digests has changed.
    """

    def __init__(self, path: Path, part: Part, dtype: np.dtype[Any]) -> None:
        self._path = path
        self._bytes = part.bytes
        self._digests = _read_digests(path, part)
        self._descriptor = _open(path)
        weakref.finalize(self, os.close, self._descriptor)
        self.require_size()
        with _explained(path):
            mapped = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ) if part.bytes else b""
        self._memory = memoryview(mapped)
        self.values = np.frombuffer(self._memory, dtype)
        self._forget()
        self._rows: tuple[int, np.ndarray] = (0, self.values)

    def _forget(self) -> None:
        """Note that no block has been checked."""
        self._seen = np.zeros(len(self._digests), dtype=np.bool_)
        self._unseen = len(self._digests)

    def require_size(self) -> None:
        """Check that the file still has its size: reading memory beyond its end kills the process.

        Raises:
            DataError: it is shorter or longer.
        """
        with _explained(self._path):
            size = os.lseek(self._descriptor, 0, os.SEEK_END)
        if size != self._bytes:
            raise DataError(
                f"{self._path} has {size} bytes, its manifest says {self._bytes}; copy it again or make the "
                "store anew"
            )

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return [n, length] values from each start on.

        Raises:
            DataError: a block of these values is damaged.
        """
        if self._unseen:
            self._verify_rows(starts, length)
        if self._rows[0] != length:
            self._rows = length, sliding_window_view(self.values, length)
        return self._rows[1][starts]

    def copy_runs(self, starts: np.ndarray, lengths: np.ndarray, out: np.ndarray, places: np.ndarray) -> None:
        """Copy runs of values into `out`, one-dimensional, of any dtype: each from its start to its place.

        Raises:
            DataError: a block of these values is damaged.
        """
        if self._unseen and len(starts):
            self._verify_rows(starts, lengths)
        values = self.values
        for start, length, place in zip(starts.tolist(), lengths.tolist(), places.tolist(), strict=True):
            out[place : place + length] = values[start : start + length]

    def _verify_rows(self, starts: np.ndarray, length: int | np.ndarray) -> None:
        """Check the blocks of rows that have not been checked; a row has at least its two ends."""
        width = self.values.itemsize
        first = starts * width // BLOCK_BYTES
        last = ((starts + length) * width - 1) // BLOCK_BYTES
        if np.max(length) * width <= BLOCK_BYTES and self._seen[first].all() and self._seen[last].all():
            return
        for begin, end in zip(first.tolist(), (last + 1).tolist(), strict=True):
            if not self._seen[begin:end].all():
                self._verify_blocks(begin, end)

    def verify(self) -> None:
        """Compare all blocks with their digests, checked ones too.

        Raises:
            DataError: names the first block that is damaged.
        """
        self.require_size()
        self._forget()
        self._verify_blocks(0, len(self._digests))

    def _verify_blocks(self, first: int, end: int) -> None:
        for block in range(first, min(end, len(self._digests))):
            if self._seen[block]:
                continue
            data = self._memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            if xxhash.xxh3_64_intdigest(data) != int(self._digests[block]):
                raise DataError(
                    f"{self._path} is damaged in block {block} (bytes {block * BLOCK_BYTES} to "
                    f"{block * BLOCK_BYTES + len(data)}); copy it again or make the store anew"
                )
            self._seen[block] = True
            self._unseen -= 1


def _open(path: Path) -> int:
    with _explained(path):
        return os.open(path, os.O_RDONLY)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """A context that turns errors of the file system into errors that name the file."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path} is missing; copy it again or make the store anew") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _read_digests(path: Path, part: Part) -> np.ndarray:
    """[blocks] uint64, small enough to be compared with the manifest each time."""
    listed = path.with_name(path.name + DIGESTS)
    with _explained(listed), listed.open("rb") as file:
        raw = file.read()
    if xxhash.xxh3_128_hexdigest(raw) != part.digest or len(raw) != 8 * -(-part.bytes // BLOCK_BYTES):
        raise DataError(f"{listed} is damaged: it is not what the manifest says; copy it again")
    return np.frombuffer(raw, "<u8")


class HashedFile:
    """A file that is hashed block by block while it is written; the digests are written beside it.

    Args:
        path: the file.
        kept: number of bytes of the existing file that stay, and are hashed again.
    """

    def __init__(self, path: Path, kept: int = 0) -> None:
        self._path = path
        self._file: IO[bytes] = path.open("r+b" if kept else "wb")
        self._hash = xxhash.xxh3_64()
        self._digests = array("Q")
        self._in_block = 0
        self._bytes = 0
        while self._bytes < kept:
            read = self._file.read(min(kept - self._bytes, BLOCK_BYTES))
            if not read:
                raise DataError(
                    f"{path} has {self._bytes} bytes, of which {kept} were kept; remove its folder"
                )
            self._hash_next(memoryview(read))
        self._file.truncate()

    def write(self, data: bytes) -> None:
        """Append."""
        view = memoryview(data)
        self._file.write(view)
        self._hash_next(view)

    def sync(self) -> int:
        """Bring all written bytes to the disk; returns their number."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._bytes

    def _hash_next(self, view: memoryview) -> None:
        self._bytes += len(view)
        while len(view):
            taken = view[: BLOCK_BYTES - self._in_block]
            self._hash.update(taken)
            self._in_block += len(taken)
            view = view[len(taken) :]
            if self._in_block == BLOCK_BYTES:
                self._end_block()

    def _end_block(self) -> None:
        self._digests.append(self._hash.intdigest())
        self._hash.reset()
        self._in_block = 0

    def finish(self) -> Part:
        """Bring everything to the disk."""
        if self._in_block:
            self._end_block()
        sync_and_close(self._file)
        raw = np.asarray(self._digests, dtype="<u8").tobytes()
        with self._path.with_name(self._path.name + DIGESTS).open("wb") as file:
            file.write(raw)
            sync_and_close(file)
        return Part(bytes=self._bytes, digest=xxhash.xxh3_128_hexdigest(raw))

    def abandon(self) -> None:
        """Close the file; write errors no longer matter."""
        with contextlib.suppress(OSError):
            self._file.close()


def sync_and_close(file: IO[bytes]) -> None:
    """Flush to disk and close, so that the data survive a power cut."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
