"""A store writer that goes on where a killed process stopped, with the same bytes."""

from __future__ import annotations

import fcntl
import shutil
import time
from pathlib import Path
from types import TracebackType

import msgspec
from forge_config import Config

from forge_data.error import DataError
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
    """Keeps what it wrote beside the place of the store until that is published.

    Args:
        folder: where the store will be; must not exist.
        vocab_size: decides the dtype.
        tokenizer: digest of the tokenizer.
        targets: whether it is said of each token if it is a target.
        work: names what is written; what was kept of other work is written anew.

    Attributes:
        tasks: how many were written, by this process or an earlier one.

    Raises:
        DataError: another process writes this store.
    """

    def __init__(self, folder: Path, vocab_size: int, tokenizer: str, targets: bool, work: str) -> None:
        super().__init__(folder, vocab_size, tokenizer, targets)
        self._partial = folder.with_name(f".{folder.name}.partial")
        self._work = work
        self._committed = time.monotonic()
        self.tasks = 0

    def __enter__(self) -> RestartableWriter:
        with self._explained():
            self._partial.mkdir(parents=True, exist_ok=True)
            self._lock = (self._partial / "lock").open("w")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise DataError(
                    f"another process writes {self.folder}, in {self._partial}; wait for it"
                ) from None
            kept = self._kept()
            self.tasks, self.num_tokens, self.num_docs = kept.tasks, kept.num_tokens, kept.num_docs
            self._tokens = HashedFile(self._partial / "tokens.bin", kept.token_bytes)
            self._docs = HashedFile(self._partial / "docs.idx", 8 * kept.num_docs)
            if self._with_targets:
                self._targets = HashedFile(self._partial / "targets.bin", kept.num_tokens)
        return self

    def _kept(self) -> _Progress:
        """What an earlier process has brought to the disk of the same work."""
        try:
            kept = msgspec.json.decode((self._partial / "progress.json").read_bytes(), type=_Progress)
        except (OSError, msgspec.MsgspecError):
            return _Progress(work=self._work)
        return kept if kept.work == self._work else _Progress(work=self._work)

    def task_done(self) -> None:
        """Count a task whose documents were all added; now and then, bring all to the disk."""
        self.tasks += 1
        if time.monotonic() - self._committed < COMMIT_S:
            return
        with self._explained():
            files = [self._tokens, self._docs] + ([self._targets] if self._targets is not None else [])
            token_bytes, *_ = [file.sync() for file in files]
            progress = _Progress(
                work=self._work,
                tasks=self.tasks,
                num_tokens=self.num_tokens,
                num_docs=self.num_docs,
                token_bytes=token_bytes,
            )
            written = self._partial / "progress.tmp"
            written.write_bytes(msgspec.json.encode(progress))
            written.replace(self._partial / "progress.json")
        self._committed = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                with self._explained():
                    for name in ("progress.json", "lock"):
                        (self._partial / name).unlink(missing_ok=True)
                    self._publish()
        finally:
            for file in (self._tokens, self._docs, self._targets):
                if file is not None:
                    file.abandon()
            self._lock.close()
            if kind is not None and issubclass(kind, DataError):
                shutil.rmtree(self._partial, ignore_errors=True)
