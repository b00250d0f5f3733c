"""A store writer that continues after a kill or an error, with the same bytes."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
from forge_config import Config

from forge_data.error import DataError
from forge_data.locks import held_alone, release
from forge_data.store.blocks import HashedFile
from forge_data.store.tokens import Writer

COMMIT_S = 10.0
"""How much work a kill loses, in seconds."""


class _Progress(Config):
    work: str
    tasks: int = 0
    num_tokens: int = 0
    num_docs: int = 0
    token_bytes: int = 0


class RestartableWriter(Writer):
    """Keeps written data beside the place of the store until the store is published.

    Args:
        folder: where the store will be; must not exist.
        vocab_size: decides the dtype.
        tokenizer: digest of the tokenizer.
        targets: whether the store marks each token as a target or not.
        work: names the work; data kept from other work are written anew.

    Raises:
        DataError: another process writes this store, or has written it.
    """

    def __init__(self, folder: Path, vocab_size: int, tokenizer: str, targets: bool, work: str) -> None:
        super().__init__(folder, vocab_size, tokenizer, targets)
        self._partial = folder.with_name(f".{folder.name}.partial")
        self._lock_path = folder.with_name(f".{folder.name}.partial.lock")
        self._done = _Progress(work=work)
        self._committed = time.monotonic()

    def __enter__(self) -> RestartableWriter:
        with self._explained():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            lock = held_alone(self._lock_path)
            if lock is None:
                raise DataError(f"another process writes {self.folder}, in {self._partial}; wait for it")
            self._lock = lock
        try:
            with self._explained():
                self._open()
        except BaseException:
            release(self._lock_path, self._lock)
            raise
        return self

    def _open(self) -> None:
        if self.folder.exists():
            raise DataError(f"{self.folder} exists already: another process has written it meanwhile")
        self._partial.mkdir(exist_ok=True)
        self._done = kept = self._kept()
        self.tasks, self.num_tokens, self.num_docs = kept.tasks, kept.num_tokens, kept.num_docs
        self._tokens = HashedFile(self._partial / "tokens.bin", kept.token_bytes)
        self._docs = HashedFile(self._partial / "docs.idx", 8 * kept.num_docs)
        if self._with_targets:
            self._targets = HashedFile(self._partial / "targets.bin", kept.num_tokens)

    def _kept(self) -> _Progress:
        """Return what an earlier process has written of the same work."""
        nothing = _Progress(work=self._done.work)
        try:
            kept = msgspec.json.decode((self._partial / "progress.json").read_bytes(), type=_Progress)
            sizes = {"tokens.bin": kept.token_bytes, "docs.idx": 8 * kept.num_docs}
            sizes |= {"targets.bin": kept.num_tokens} if self._with_targets else {}
            is_there = all((self._partial / name).stat().st_size >= size for name, size in sizes.items())
        except (OSError, msgspec.MsgspecError):
            return nothing
        return kept if kept.work == nothing.work and is_there else nothing

    def task_done(self) -> None:
        """Count a task whose documents were all added; now and then, sync all to the disk."""
        self._done = _Progress(
            work=self._done.work,
            tasks=self._done.tasks + 1,
            num_tokens=self.num_tokens,
            num_docs=self.num_docs,
            token_bytes=self.num_tokens * np.dtype(self._dtype).itemsize,
        )
        if time.monotonic() - self._committed >= COMMIT_S:
            self._commit()

    def forget(self) -> None:
        """Discard the written data: an error removes them."""
        self._done = _Progress(work=self._done.work)

    def _commit(self) -> None:
        """Sync the finished tasks to the disk, and record there that they are finished."""
        with self._explained():
            for file in [self._tokens, self._docs] + ([self._targets] if self._targets is not None else []):
                file.sync()
            written = self._partial / "progress.tmp"
            written.write_bytes(msgspec.json.encode(self._done))
            written.replace(self._partial / "progress.json")
        self._committed = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                with self._explained():
                    (self._partial / "progress.json").unlink(missing_ok=True)
                    self._publish()
            elif self._done.tasks:
                # An error leaves what a kill does; on a full disk, that is the last commit.
                with contextlib.suppress(DataError):
                    self._commit()
            elif issubclass(kind, DataError):
                shutil.rmtree(self._partial, ignore_errors=True)
        finally:
            for file in (self._tokens, self._docs, self._targets):
                if file is not None:
                    file.abandon()
            release(self._lock_path, self._lock)
