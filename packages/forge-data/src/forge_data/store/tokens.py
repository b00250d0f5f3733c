"""Token stores: a folder with `tokens.bin`, `docs.idx` and a manifest with their contents and digests.

`tokens.bin` holds little-endian ids, `docs.idx` the uint64 index at which each document ends, its end token
included, and `targets.bin`, if some tokens are no targets, a byte for each token: 1 if it is one. Beside
each lies the list of the digests of its blocks (see `forge_data.store.blocks`).
"""

from __future__ import annotations

import contextlib
import glob
import os
import platform
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash
from forge_config import Config

from forge_data.error import DataError
from forge_data.store.blocks import HashedFile, Part, VerifiedFile, sync_and_close

FORMAT = 2
CHUNK = 1 << 22
"""Numbers looked at together when all are."""
MANIFEST = "manifest.json"
STALE_S = 3600


class Manifest(Config):
    """The manifest of a token store.

    Attributes:
        format: version of this layout.
        dtype: of `tokens.bin`.
        vocab_size: ids are below this.
        tokenizer: digest of the tokenizer.
        num_tokens: ids in `tokens.bin`.
        num_docs: documents.
        tokens: the file `tokens.bin`.
        docs: the file `docs.idx`.
        targets: the file `targets.bin`; None where every token is a target.
    """

    format: int
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    tokenizer: str
    num_tokens: int
    num_docs: int
    tokens: Part
    docs: Part
    targets: Part | None = None

    @property
    def digest(self) -> str:
        """Names the content."""
        parts = [self.dtype, self.tokens.digest, self.docs.digest, self.tokenizer]
        parts += [self.targets.digest] if self.targets else []
        return xxhash.xxh3_128_hexdigest("/".join(parts).encode())


class TokenStore:
    """A store opened for reading; data are read on demand.

    Attributes:
        folder: its folder.
        manifest: its manifest.
    """

    def __init__(self, folder: Path | str) -> None:
        """Open a store.

        Raises:
            DataError: it is missing, of another format, or a file does not have the size of the manifest.
        """
        self.folder = Path(folder)
        self.manifest = _read_manifest(self.folder)
        little = np.dtype(self.manifest.dtype).newbyteorder("<")
        self._tokens = VerifiedFile(self.folder / "tokens.bin", self.manifest.tokens, little)
        # Read as int64: searching uint64 with int64 would convert the whole array to float64 first.
        self._docs = VerifiedFile(self.folder / "docs.idx", self.manifest.docs, np.dtype("<i8"))
        self._targets: VerifiedFile | None = None
        if self.manifest.targets is not None:
            self._targets = VerifiedFile(
                self.folder / "targets.bin", self.manifest.targets, np.dtype(np.uint8)
            )

    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        return TokenStore, (self.folder,)

    def __len__(self) -> int:
        return self.manifest.num_tokens

    def require_files(self) -> None:
        """Check that the files still have their size: reading memory beyond their end would kill the process.

        Raises:
            DataError: one is shorter or longer than it was.
        """
        self._tokens.require_size()
        self._docs.require_size()
        if self._targets is not None:
            self._targets.require_size()

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return ids from verified blocks; each block is checked at its first access.

        Args:
            starts: [n] int64, the first token of each row.
            length: length of each row.

        Returns:
            [n, length] in the dtype of the store.

        Raises:
            DataError: names the store and the block that is damaged.
        """
        return self._tokens.rows(starts, length)

    def copy_runs(self, starts: np.ndarray, lengths: np.ndarray, out: np.ndarray, places: np.ndarray) -> None:
        """Copy the ids of runs of different lengths; checked as in `read`.

        Args:
            starts: [n] int64, the first token of each run.
            lengths: [n] int64, at least one each.
            out: one-dimensional, of any dtype that holds the ids.
            places: [n] int64, where in `out` each run goes to.

        Raises:
            DataError: names the store and the block that is damaged.
        """
        self._tokens.copy_runs(starts, lengths, out, places)

    def no_targets(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return rows and columns, two [k] int64, of the ids of `read` that are no targets; None if all are.

        Raises:
            DataError: names the store and the block that is damaged.
        """
        if self._targets is None:
            return None
        rows, columns = np.nonzero(self._targets.rows(starts, length) == 0)
        return rows, columns

    def copy_targets(
        self, starts: np.ndarray, lengths: np.ndarray, out: np.ndarray, places: np.ndarray
    ) -> bool:
        """Copy for each id of `copy_runs` whether it is a target, 1 or 0; False, and no copy, if all are.

        Raises:
            DataError: names the store and the block that is damaged.
        """
        if self._targets is None:
            return False
        self._targets.copy_runs(starts, lengths, out, places)
        return True

    def require_targets(self) -> None:
        """Check that some token is a target.

        Raises:
            DataError: none is, so that nothing can be learned from this store.
        """
        if self._targets is None:
            return
        values = self._targets.values
        if not any(values[start : start + CHUNK].any() for start in range(0, len(values), CHUNK)):
            raise DataError(
                f"no token of {self.folder} is a target, so that nothing is learned from it; see that its "
                "completions have text, and its conversations turns of the assistant (`roles`)"
            )

    @cached_property
    def doc_ends(self) -> np.ndarray:
        """[num_docs] int64 index at which each document ends; checked as a whole when first asked for.

        Raises:
            DataError: names the store and the block that is damaged.
        """
        self._docs.verify()
        return self._docs.values

    def verify(self) -> None:
        """Read everything and compare it with the manifest.

        Raises:
            DataError: names the file and the first block that differs, or an id outside the vocabulary.
        """
        self._tokens.verify()
        self._docs.verify()
        if self._targets is not None:
            self._targets.verify()
        self.require_targets()
        self._verify_documents()
        for start in range(0, len(self), CHUNK):
            if int(self._tokens.values[start : start + CHUNK].max()) >= self.manifest.vocab_size:
                raise DataError(
                    f"{self.folder} holds ids outside the vocabulary of {self.manifest.vocab_size}"
                )

    def _verify_documents(self) -> None:
        """Check that ends rise strictly from above 0 to the number of tokens."""
        last = 0
        for start in range(0, len(self.doc_ends), CHUNK):
            ends = self.doc_ends[start : start + CHUNK]
            if ends[0] <= last or np.any(ends[1:] <= ends[:-1]):
                raise DataError(f"{self.folder}/docs.idx does not rise from document {start} on")
            last = int(ends[-1])
        if last != len(self):
            raise DataError(f"{self.folder}/docs.idx ends at token {last}, tokens.bin at {len(self)}")


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        raw = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if raw.get("format") != FORMAT:
            raise DataError(
                f"{folder} has format {raw.get('format')}; this version reads format {FORMAT}: make the "
                "store anew with forge-data tokenize"
            )
        manifest = msgspec.convert(raw, Manifest)
    except FileNotFoundError:
        hint = "tokens of other projects become one by `forge-data import`"
        raise DataError(f"{folder} is no token store: it has no {MANIFEST}; {hint}") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    for name, part, count, width in (
        ("tokens", manifest.tokens, manifest.num_tokens, np.dtype(manifest.dtype).itemsize),
        ("docs", manifest.docs, manifest.num_docs, 8),
        ("targets", manifest.targets, manifest.num_tokens, 1),
    ):
        if part is not None and part.bytes != count * width:
            raise DataError(
                f"{path} contradicts itself: {count} {name} of {width} bytes each are not {part.bytes} "
                "bytes; make the store anew"
            )
    return manifest


def store_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The narrowest dtype that holds all ids."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class Writer:
    """Context manager that writes a store beside its place and publishes it by one rename on success.

    Args:
        folder: where the store will be; must not exist.
        vocab_size: decides the dtype.
        tokenizer: digest of the tokenizer.
        targets: whether the store marks each token as a target or not.

    Attributes:
        num_tokens: ids written so far.
        num_docs: documents written so far.
        tasks: parts of the text whose documents were all written by an earlier process.
    """

    tasks = 0

    def __init__(self, folder: Path, vocab_size: int, tokenizer: str, targets: bool = False) -> None:
        self.folder = folder
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._with_targets = targets
        self._targets: HashedFile | None = None
        self._dtype: Literal["uint16", "uint32"] = store_dtype(vocab_size)
        self._partial = folder.with_name(
            f".{folder.name}.{platform.node()}.{os.getpid()}.{secrets.token_hex(4)}"
        )
        self.num_tokens = 0
        self.num_docs = 0

    def __enter__(self) -> Writer:
        self._sweep()
        with self._explained():
            self._partial.mkdir(parents=True)
            self._tokens = HashedFile(self._partial / "tokens.bin")
            self._docs = HashedFile(self._partial / "docs.idx")
            if self._with_targets:
                self._targets = HashedFile(self._partial / "targets.bin")
        return self

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"the store {self.folder} cannot be written: {error}; make room, or choose another disk"
            ) from error

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

    def add(self, tokens: np.ndarray, doc_lengths: Iterable[int], targets: np.ndarray | None = None) -> None:
        """Append whole documents.

        Args:
            tokens: the ids of all documents, concatenated.
            doc_lengths: number of ids of each document, at least one.
            targets: bool for each id, whether it is a target; only for a store with targets.

        Raises:
            DataError: an id is outside the vocabulary, the lengths do not add up, or the disk is full.
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
        ids = np.ascontiguousarray(tokens, dtype=np.dtype(self._dtype).newbyteorder("<"))
        with self._explained():
            self._tokens.write(ids.tobytes())
            self._docs.write(ends.astype("<u8").tobytes())
            if self._targets is not None:
                assert targets is not None and len(targets) == len(tokens)
                self._targets.write(targets.astype(np.uint8).tobytes())
        self.num_tokens += len(tokens)
        self.num_docs += len(ends)

    def task_done(self) -> None:
        """Note that all documents of a part of the text were added."""

    def forget(self) -> None:
        """Discard the written data."""

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                with self._explained():
                    self._publish()
        finally:
            self._tokens.abandon()
            self._docs.abandon()
            if self._targets is not None:
                self._targets.abandon()
            shutil.rmtree(self._partial, ignore_errors=True)

    def _publish(self) -> None:
        manifest = Manifest(
            format=FORMAT,
            dtype=self._dtype,
            vocab_size=self._vocab_size,
            tokenizer=self._tokenizer,
            num_tokens=self.num_tokens,
            num_docs=self.num_docs,
            tokens=self._tokens.finish(),
            docs=self._docs.finish(),
            targets=self._targets.finish() if self._targets is not None else None,
        )
        with (self._partial / MANIFEST).open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest)))
            sync_and_close(file)
        try:
            self._partial.rename(self.folder)
            _sync(self.folder.parent)
        except OSError:
            # Another process published the same store first; ours is not needed.
            if not (self.folder / MANIFEST).exists():
                raise


def _sync(folder: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
