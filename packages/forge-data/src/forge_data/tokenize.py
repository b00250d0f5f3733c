"""From files of text to a token store, with several processes and the same bytes whatever their number."""

from __future__ import annotations

import gzip
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from forge_data.error import DataError
from forge_data.order import key
from forge_data.tokenizer import Tokenizer, TokenizerConfig
from forge_data.tokens import TokenStore, Writer

TASK_BYTES = 8 << 20
"""Large .jsonl files are cut into ranges of about this size; small files are worked on one by one."""


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


def tokenize(
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
    with _mapping(workers) as mapped, Writer(out, built.vocab_size, built.digest) as writer:
        for task, (tokens, lengths) in zip(tasks, mapped(work, tasks), strict=True):
            writer.add(tokens, lengths)
            done += task.bytes
            if on_progress is not None:
                on_progress(done, total)
    store = TokenStore(out)
    if not len(store):
        raise DataError(f"no document was left for {out} out of {len(files)} files")
    return store


@contextmanager
def _mapping(workers: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """`map` in this process, or over several, in order either way."""
    if workers <= 1:
        yield map
        return
    # forkserver: a fork of a process with threads may hang, and the server has no torch to copy
    with multiprocessing.get_context("forkserver").Pool(workers) as pool:
        yield pool.imap


def _tasks(path: Path, root: Path) -> list[Task]:
    name = str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
    size = path.stat().st_size
    if path.suffix == ".jsonl":
        cuts = [*range(0, max(size, 1), TASK_BYTES), size]
        return [Task(path, name, a, b, b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
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
    end = np.asarray([encoder.eos_id])
    parts: list[np.ndarray] = []
    lengths: list[int] = []
    for name, text in _documents(task, field):
        if held.takes(name) and text:
            ids = encoder.encode(text)
            parts += [ids, end]
            lengths.append(len(ids) + 1)
    return np.concatenate(parts) if parts else end[:0], lengths


def _documents(task: Task, field: str) -> Iterator[tuple[str, str]]:
    """Name and text of each document of a task. Bytes that are no UTF-8 become replacement characters."""
    if task.path.suffix == ".parquet":
        rows = _parquet(task.path).read_row_group(task.start, columns=[field]).column(field).to_pylist()
        for index, text in enumerate(rows):
            yield f"{task.name}:{task.start}.{index}", text or ""
    elif task.path.suffix == ".jsonl" or task.path.name.endswith(".jsonl.gz"):
        for position, line in _lines(task):
            yield f"{task.name}:{position}", _row_text(task.path, position, line, field)
    else:
        raw = gzip.decompress(task.path.read_bytes()) if task.path.suffix == ".gz" else task.path.read_bytes()
        yield task.name, raw.decode("utf-8", errors="replace")


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
        text = json.loads(line)[field]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} at {position}: no row with a text under {field!r}: {error!r}") from None
    if not isinstance(text, str):
        raise DataError(f"{path} at {position}: {field!r} holds {type(text).__name__}, not text")
    return text


def _parquet(path: Path) -> Any:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError("reading .parquet needs: pip install 'forge-data[parquet]'") from None
    return ParquetFile(path)
