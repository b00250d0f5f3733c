"""From files of text to a token store, by several processes, with the same bytes for any number."""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import os
import pickle
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from forge_data.error import DataError, NothingHeldOutError
from forge_data.job_signals import blocked
from forge_data.order.order import key
from forge_data.sources.columns import Columns, TextColumn, named
from forge_data.sources.documents import Task, documents, portions, tasks_of
from forge_data.sources.remote import HubFile
from forge_data.store.restart import RestartableWriter
from forge_data.store.tokens import TokenStore, Writer, store_dtype
from forge_data.tokenizer.encoding import encoded
from forge_data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, file_digest

Done = TypeVar("Done")

AHEAD = 4
"""Tasks in flight for each process."""

SMALL_BYTES = 16 << 20
"""Less text is tokenized sooner by one process than others take to start."""

SAID_EVERY_S = 10.0


@dataclass(frozen=True)
class Held:
    """The documents of a split, chosen by their names.

    Attributes:
        split: `validation` takes the held-out documents, `train` the others.
        fraction: fraction of documents that is held out.
    """

    split: Literal["train", "validation"] = "train"
    fraction: float = 0.0

    def takes(self, name: str) -> bool:
        """Whether a document belongs to the split."""
        return (place(name) < self.fraction) == (self.split == "validation")

    def takes_none_of(self, places: Sequence[float], what: str = "document") -> DataError:
        """Return the error for a split without any document.

        Args:
            places: places of the documents that there are.
            what: their name in the message.
        """
        held_out, number = f"held_out = {self.fraction:g}", len(places)
        if self.split == "train":
            most = 0 if number == 1 else _below(max(places))
            return DataError(
                f"{held_out} keeps all documents ({number}) for validation, and leaves none to train on; set "
                f"held_out = {most:g}, or give validation text of its own"
            )
        if number == 1:
            return NothingHeldOutError(
                f"there is a single {what}, and {held_out} holds none out; give validation text of its own"
            )
        return NothingHeldOutError(
            f"{held_out} chooses none of {number} {what}s for validation; set held_out = "
            f"{_above(min(places)):g} to choose one, or give validation text of its own"
        )


def place(name: str) -> float:
    """Return the place of a document in [0, 1), by its name: below `held_out`, it is for validation."""
    return key("held-out", name) / 2**64


def _above(place: float) -> float:
    """A number above it with few digits."""
    return (math.floor(place * 1000) + 1) / 1000


def _below(place: float) -> float:
    """A number up to it with few digits."""
    return math.floor(place * 1000) / 1000


Progress = Callable[[int, int], None]
"""Called with the bytes read so far and in all."""


class Making(NamedTuple):
    """How the text of a source is tokenized; the tokens do not depend on it.

    Attributes:
        workers: processes; 0 is one for each core that this process may use, or one alone for little text.
        on_progress: receives the progress after each part of a file.
        contents: digests of files that were read already; grows. None keeps none.
    """

    workers: int = 1
    on_progress: Progress | None = None
    contents: dict[Path, str] | None = None

    def saying(self, what: str) -> Progress:
        """Return `on_progress`, combined with lines on standard error now and then."""
        say = say_progress(what)

        def report(done: int, total: int) -> None:
            say(done, total)
            if self.on_progress is not None:
                self.on_progress(done, total)

        return report


ALONE = Making()
"""By one process, told to nobody."""


def say_progress(what: str) -> Progress:
    """Return a function that writes progress on standard error now and then."""
    last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SAID_EVERY_S:
            last = time.monotonic()
            sys.stderr.write(f"tokenizing {what}: {done:,} of {total:,} bytes\n")

    return show


def cores() -> int:
    """Return the cores this process may use, which on a cluster are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tokenize_files(
    files: Sequence[Path],
    out: Path,
    tokenizer: TokenizerConfig,
    *,
    root: Path,
    columns: Columns | None = None,
    held: Held | None = None,
    workers: int = 1,
    on_progress: Progress | None = None,
    restart: bool = False,
    seen: Sequence[tuple[int, int]] = (),
    what: str = "the text",
) -> TokenStore:
    """Write the documents of files, in order, each followed by the end-of-document token.

    Args:
        files: .jsonl (also .gz and .zst), .parquet and .arrow hold a document a row; others are one.
        out: folder of the store; must not exist.
        tokenizer: tokenizer of the text.
        root: names of documents are relative to this.
        columns: the parts of a row that make a document; absent means the column `text`.
        held: the documents to take; absent means all.
        workers: processes; 0 is as in `Making`. The result does not depend on it.
        on_progress: receives the progress.
        restart: keep the written data if this process is killed, and continue from there the next time.
        seen: result of `states_of` when `out` was named after the files; absent means now.
        what: what is tokenized, for the summary.

    Raises:
        DataError: `out` exists, a row has no text, no document is left, or a file has changed meanwhile.
    """
    if out.exists():
        raise DataError(f"{out} exists already; remove it or choose another folder")
    built = tokenizer.build()
    columns = columns or TextColumn()
    seen = seen or states_of(files)
    as_text = getattr(columns, "as_text", ())
    tasks = [task for file in files for task in tasks_of(file, root, as_text)]
    work = partial(_tokenize_task, tokenizer=tokenizer, columns=columns, held=held or Held())
    total = sum(task.bytes for task in tasks)
    workers = workers or (cores() if total > SMALL_BYTES else 1)
    made = built.vocab_size, built.digest, columns.masks
    if restart:
        kept_as = key("tokenize in portions", file_digest(built), named(columns, built), held, tasks, seen)
        writer: Writer = RestartableWriter(out, *made, work=f"{kept_as:016x}")
    else:
        writer = Writer(out, *made)
    with writer:
        cut = portions(tasks, as_text)
        done, empty = sum(task.bytes for task in itertools.islice(cut, writer.tasks)), 0
        try:
            for task, found in in_order(work, cut, workers):
                writer.add(*found[:3])
                writer.task_done()
                empty += found.empty
                done += task.bytes
                if on_progress is not None:
                    on_progress(done, total)
            if not writer.num_docs:
                raise _nothing(portions(tasks, as_text), columns, built, held or Held())
        finally:
            _require_unchanged(files, seen, writer)
    sys.stderr.write(f"{what}: {_read(files, writer.num_docs, empty)}\n")
    return TokenStore(out)


def states_of(files: Sequence[Path]) -> list[tuple[int, int]]:
    """Return size and modification time, in ns, of each file.

    Raises:
        DataError: one is gone.
    """
    found: list[tuple[int, int]] = []
    for file in files:
        try:
            state = file.stat()
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error}") from None
        found.append((state.st_size, state.st_mtime_ns))
    return found


def _require_unchanged(files: Sequence[Path], seen: Sequence[tuple[int, int]], writer: Writer) -> None:
    try:
        now = states_of(files)
    except DataError:
        writer.forget()
        raise
    changed = [file for file, a, b in zip(files, seen, now, strict=True) if a != b]
    if changed:
        writer.forget()
        raise DataError(
            f"{changed[0]} has changed while the text was tokenized ({len(changed)} of {len(files)} files "
            "did); start again when nobody writes there"
        )


def _read(files: Sequence[Path], num_docs: int, empty: int) -> str:
    """A summary of the files read."""
    counts = Counter(_ending(file) for file in files)
    listed = ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common(8))
    if len(counts) > 8:
        listed += f" and {len(counts) - 8} other endings"
    passed = f", {empty:,} rows without text passed over" if empty else ""
    return f"{num_docs:,} documents of {len(files):,} files ({listed}){passed}"


def _ending(file: Path) -> str:
    packed = file.suffix.lower() in (".gz", ".zst")
    return (Path(file.stem).suffix if packed else "") + file.suffix or "no ending"


def _nothing(tasks: Iterable[Task], columns: Columns, tokenizer: Tokenizer, held: Held) -> DataError:
    """Why no document of these files is in the split."""
    places, files = list[float](), set[Path | HubFile]()
    for task in tasks:
        files.add(task.path)
        places += [place(name) for name, text in documents(task, columns, tokenizer) if text.text]
    return held.takes_none_of(places) if places else DataError(f"there is no text in {len(files)} files")


def in_order(
    work: Callable[[Task], Done], tasks: Iterable[Task], workers: int
) -> Iterator[tuple[Task, Done]]:
    """Yield tasks and their results, computed here or by several processes; in order, few waiting at a time.

    Raises:
        DataError: a process died.
    """
    if workers <= 1:
        yield from ((task, work(task)) for task in tasks)
        return
    # forkserver: a fork of a process with threads may hang, and the server has no torch to copy
    context = multiprocessing.get_context("forkserver")
    starting = _without_main if b"__main__" not in pickle.dumps(work) else contextlib.nullcontext
    with blocked(), starting():
        ensure_running()
    waiting: deque[tuple[Task, Future[Any]]] = deque()
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool:
        try:
            for task in tasks:
                with starting():
                    waiting.append((task._replace(lines=None), pool.submit(work, task)))
                if len(waiting) > AHEAD * workers:
                    first, found = waiting.popleft()
                    yield first, found.result()
            while waiting:
                first, found = waiting.popleft()
                yield first, found.result()
        except BrokenProcessPool:
            raise DataError(
                "a process that tokenized was killed, perhaps for want of memory; use fewer (--workers, or "
                "data.tokenize_workers)"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """A context in which new processes do not run the main script again.

    It may have no `__main__` guard, and would wait for the lock that this process holds.
    """
    main = sys.modules["__main__"]
    kept = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        del main.__spec__
        main.__dict__.update(kept)


def _end_with_parent() -> None:
    """End this process of the pool when its parent has died, instead of waiting for it for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


_built: dict[TokenizerConfig, Tokenizer] = {}


class _Done(NamedTuple):
    """Ids of the documents of a task, concatenated; their lengths; which ids are targets, if asked.

    And the number of rows without text.
    """

    tokens: np.ndarray
    lengths: list[int]
    targets: np.ndarray | None
    empty: int = 0


def _tokenize_task(task: Task, tokenizer: TokenizerConfig, columns: Columns, held: Held) -> _Done:
    if tokenizer not in _built:
        _built[tokenizer] = tokenizer.build()
    encoder = _built[tokenizer]
    found, lengths, targets, empty = list[np.ndarray](), list[int](), list[np.ndarray](), 0
    for name, document in documents(task, columns, encoder):
        if not held.takes(name):
            continue
        if not document.text:
            empty += 1
            continue
        ids, are_targets = encoded(encoder, document, columns.masks)
        found.append(ids)
        lengths.append(len(ids))
        if are_targets is not None:
            targets.append(are_targets)
    tokens = np.concatenate(found) if found else np.zeros(0, store_dtype(encoder.vocab_size))
    if not columns.masks:
        return _Done(tokens, lengths, None, empty)
    return _Done(tokens, lengths, np.concatenate([np.zeros(0, dtype=bool), *targets]), empty)
