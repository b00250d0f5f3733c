"""From files of text to a token store, with several processes and the same bytes whatever their number."""

from __future__ import annotations

import gzip
import itertools
import json
import multiprocessing
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from forge_data.error import DataError
from forge_data.order import key
from forge_data.tokenizer import Tokenizer, TokenizerConfig
from forge_data.tokens import TokenStore, Writer, store_dtype

TASK_BYTES = 8 << 20
"""Large .jsonl files are cut into ranges of about this size; small files are worked on one by one."""

AHEAD = 4
"""Tasks in flight for each process."""


@dataclass(frozen=True)
class Held:
    """Which documents belong to a split, decided by their names.

    Attributes:
        split: `validation` takes the held-out documents, `train` the others.
        fraction: how many are held out.
    """

    split: Literal["train", "validation"] = "train"
    fraction: float = 0.0

    def takes(self, name: str) -> bool:
        """Whether a document belongs to the split."""
        held_out = key("held-out", name) / 2**64 < self.fraction
        return held_out == (self.split == "validation")


class Task(NamedTuple):
    """Part of a file: bytes `start` to `stop` (.jsonl), row group `start` (.parquet), or all of it.

    Attributes:
        path: the file.
        name: its name relative to the root; documents are named after it.
        start: where the part starts.
        stop: where it ends.
        bytes: about how many bytes are read.
    """

    path: Path
    name: str
    start: int
    stop: int
    bytes: int


Progress = Callable[[int, int], None]
"""Called with the bytes read so far and in all."""


def tokenize_files(
    files: Sequence[Path],
    out: Path,
    tokenizer: TokenizerConfig,
    *,
    root: Path,
    field: str = "text",
    held: Held | None = None,
    workers: int = 1,
    on_progress: Progress | None = None,
) -> TokenStore:
    """Write the documents of files, in order, each followed by the end-of-document token.

    Args:
        files: .jsonl and .parquet (also .jsonl.gz) hold a document a row; any other file is one document.
        out: folder of the store; must not exist.
        tokenizer: of the text.
        root: names of documents are relative to this.
        field: key of the text in rows.
        held: which documents are taken; all when absent.
        workers: processes. The result does not depend on it.
        on_progress: told how far it is.

    Raises:
        DataError: `out` exists, a row has no text, or no document is left.
    """
    if out.exists():
        raise DataError(f"{out} exists already; remove it or choose another folder")
    built = tokenizer.build()
    tasks = [task for file in files for task in _tasks(file, root)]
    work = partial(_tokenize_task, tokenizer=tokenizer, field=field, held=held or Held())
    total, done = sum(task.bytes for task in tasks), 0
    with Writer(out, built.vocab_size, built.digest) as writer:
        for task, (tokens, lengths) in zip(tasks, _map(work, tasks, workers), strict=True):
            writer.add(tokens, lengths)
            done += task.bytes
            if on_progress is not None:
                on_progress(done, total)
        if not writer.num_docs:
            raise DataError(_nothing(len(files), held or Held()))
    return TokenStore(out)


def _nothing(num_files: int, held: Held) -> str:
    if not held.fraction:
        return f"there is no text in {num_files} files"
    return (
        f"no document of {num_files} files is in the {held.split} split with held_out = {held.fraction:g}; "
        "change it, or give validation text of its own"
    )


def _map(work: Callable[[Task], Any], tasks: Sequence[Task], workers: int) -> Iterator[Any]:
    """`map` in this process, or over several; in order either way, with few results waiting at a time.

    Raises:
        DataError: a process died.
    """
    if workers <= 1:
        yield from map(work, tasks)
        return
    # forkserver: a fork of a process with threads may hang, and the server has no torch to copy
    context = multiprocessing.get_context("forkserver")
    waiting: deque[Future[Any]] = deque()
    count = min(workers, max(1, len(tasks)))
    with ProcessPoolExecutor(count, mp_context=context, initializer=_end_with_parent) as pool:
        try:
            for task in tasks:
                waiting.append(pool.submit(work, task))
                if len(waiting) > AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise DataError(
                "a process that tokenized was killed, perhaps for want of memory; use fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _end_with_parent() -> None:
    """In a process of the pool: end when the one that asks has died, rather than wait for it for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _tasks(path: Path, root: Path) -> list[Task]:
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()
    size = path.stat().st_size
    if path.suffix == ".jsonl":
        cuts = [*range(0, max(size, 1), TASK_BYTES), size]
        return [Task(path, name, a, b, b - a) for a, b in itertools.pairwise(cuts)]
    if path.suffix == ".parquet":
        groups = _parquet(path).num_row_groups
        return [Task(path, name, group, group + 1, size // groups) for group in range(groups)]
    return [Task(path, name, 0, size, size)]


_built: dict[TokenizerConfig, Tokenizer] = {}


def _tokenize_task(
    task: Task, tokenizer: TokenizerConfig, field: str, held: Held
) -> tuple[np.ndarray, list[int]]:
    """Ids of all documents of a task, one after the other, and the length of each."""
    if tokenizer not in _built:
        _built[tokenizer] = tokenizer.build()
    encoder = _built[tokenizer]
    dtype = store_dtype(encoder.vocab_size)
    end = np.asarray([encoder.eos_id], dtype=dtype)
    parts: list[np.ndarray] = []
    lengths: list[int] = []
    for name, text in _documents(task, field):
        if held.takes(name) and text:
            ids = encoder.encode(text)
            parts += [ids.astype(dtype), end]
            lengths.append(len(ids) + 1)
    return np.concatenate(parts) if parts else end[:0], lengths


def _documents(task: Task, field: str) -> Iterator[tuple[str, str]]:
    """Name and text of each document of a task. Bytes that are no UTF-8 become replacement characters."""
    if task.path.suffix == ".parquet":
        yield from _parquet_rows(task, field)
    elif task.path.suffix == ".jsonl" or task.path.name.endswith(".jsonl.gz"):
        for position, line in _lines(task):
            yield f"{task.name}:{position}", _row_text(task.path, position, line, field)
    else:
        raw = _unzipped(task.path) if task.path.suffix == ".gz" else task.path.read_bytes()
        if b"\0" in raw:
            raise DataError(f"{task.path} holds zero bytes, so it is no text; leave it out by a pattern")
        yield task.name, raw.decode("utf-8", errors="replace")


def _unzipped(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked: {error}") from None


def _parquet_rows(task: Task, field: str) -> Iterator[tuple[str, str]]:
    file = _parquet(task.path)
    if field not in file.schema_arrow.names:
        raise DataError(f"{task.path} has no column {field!r}; it has {', '.join(file.schema_arrow.names)}")
    for index, text in enumerate(file.read_row_group(task.start, columns=[field]).column(0).to_pylist()):
        if not isinstance(text, str | None):
            raise DataError(f"{task.path}: column {field!r} holds {type(text).__name__}, not text")
        yield f"{task.name}:{task.start}.{index}", text or ""


def _lines(task: Task) -> Iterator[tuple[int, bytes]]:
    """Lines that start within the part, with the position of their first byte."""
    if task.path.suffix == ".gz":
        with gzip.open(task.path) as file:
            yield from enumerate(file)
        return
    with task.path.open("rb") as file:
        if task.start:
            file.seek(task.start - 1)
            file.readline()
        while (position := file.tell()) < task.stop:
            yield position, file.readline()


def _row_text(path: Path, position: int, line: bytes, field: str) -> str:
    if not line.strip():
        return ""
    try:
        text = json.loads(line.decode("utf-8", errors="replace"))[field]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} at {position}: no row with a text under {field!r}: {error!r}") from None
    if not isinstance(text, str):
        raise DataError(f"{path} at {position}: {field!r} holds {type(text).__name__}, not text")
    # Escapes such as "\\ud800" are half characters, which no encoding has.
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _parquet(path: Path) -> Any:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError("reading .parquet needs: pip install 'forge-data[parquet]'") from None
    return ParquetFile(path)
