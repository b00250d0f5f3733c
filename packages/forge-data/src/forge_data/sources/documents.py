"""The documents of files, and how files are cut into parts that can be read alone."""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from forge_data.error import DataError
from forge_data.sources.columns import Columns, Document
from forge_data.sources.remote import HubFile, may_pass, said_by
from forge_data.tokenizer.tokenizer import Tokenizer

TASK_BYTES = 8 << 20
"""Large .jsonl files are cut into ranges of about this size; small files are worked on one by one."""

ARROW_BATCHES = 16
"""Record batches of an .arrow file that are read together; `datasets` writes a thousand rows in each."""

LINES = tuple(f"{kind}{packed}" for kind in (".jsonl", ".ndjson", ".json") for packed in ("", ".gz", ".zst"))
"""Files with a row of JSON in each line; as on the hub, .json is one of them."""

ROW_ENDINGS = (*LINES, ".parquet", ".arrow")
"""Files with a document a row, in letters of any case."""

LATER_ROW_ENDINGS = tuple(
    one for one in ROW_ENDINGS if one.startswith((".json.", ".ndjson")) or one == ".json"
)
"""Those that were read as one document each by earlier versions, whose stores are in some caches."""

TABLES = tuple(f"{kind}{packed}" for kind in (".csv", ".tsv") for packed in ("", ".gz", ".zst"))
"""Files of rows that are not read as such."""

ALL_BATCHES = 1 << 40

FOOTERS = 64
"""What of parquet files of the hub is kept, to be asked for once."""


class Task(NamedTuple):
    """Part of a file: bytes (.jsonl), a row group (.parquet), record batches (.arrow), or all of it.

    Attributes:
        path: the file.
        name: its name relative to the root; documents are named after it.
        start: where the part starts.
        stop: where it ends.
        bytes: approximate size of the part.
        lines: the lines of a part of a packed file, which cannot be read from its middle; `start` is the
            number of the first. None: they are read from the file.
    """

    path: Path | HubFile
    name: str
    start: int
    stop: int
    bytes: int
    lines: tuple[bytes, ...] | None = None


def has_rows(path: Path | HubFile, as_text: tuple[str, ...] = ()) -> bool:
    """Whether a file has one document per row, by its name.

    Args:
        path: the file.
        as_text: endings of files that are one document each, although they usually hold rows.

    Raises:
        DataError: it has rows of an unsupported kind.
    """
    name = path.name.lower()
    if as_text and name.endswith(tuple(ending.lower() for ending in as_text)):
        return False
    if name.endswith(TABLES):
        raise DataError(
            f"{path} is a table, of a kind whose rows are not read; make it .jsonl or .parquet, leave it "
            "out by a pattern, or, if it is one text, name its ending in `as_text` of a source of type files"
        )
    return name.endswith(ROW_ENDINGS)


def were_text(path: Path, as_text: tuple[str, ...] = ()) -> bool:
    """Whether earlier versions read a file with rows as one document."""
    endings = tuple(one for one in ROW_ENDINGS if one not in LATER_ROW_ENDINGS)
    return has_rows(path, as_text) and not path.name.endswith(endings)


def tasks_of(path: Path | HubFile, root: Path, as_text: tuple[str, ...] = ()) -> list[Task]:
    """Return the parts of a file; parts of hub files are named after their path in the repository.

    Args:
        path: the file.
        root: names are relative to it.
        as_text: see `has_rows`.

    Raises:
        DataError: the file is gone, damaged, or has rows of an unsupported kind.
    """
    with _damage_is_named(path):
        if isinstance(path, HubFile):
            return _cut(path, path.path, path.size, has_rows(path))
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()
        return _cut(path, name, path.stat().st_size, has_rows(path, as_text))


def _cut(path: Path | HubFile, name: str, size: int, rows: bool) -> list[Task]:
    suffix = path.suffix.lower() if rows else ""
    if suffix in (".jsonl", ".ndjson", ".json"):
        cuts = [*range(0, max(size, 1), TASK_BYTES), size]
        return [Task(path, name, a, b, b - a) for a, b in itertools.pairwise(cuts)]
    if suffix == ".parquet":
        groups = _parquet(path).num_row_groups
        return [Task(path, name, group, group + 1, size // groups) for group in range(groups)]
    if suffix == ".arrow" and isinstance(path, HubFile):
        return [Task(path, name, 0, ALL_BATCHES, size)]  # it would be read up to each part
    if suffix == ".arrow":
        count = sum(1 for _ in _arrow_batches(path))
        cuts = [*range(0, count, ARROW_BATCHES), count]
        return [Task(path, name, a, b, size * (b - a) // count) for a, b in itertools.pairwise(cuts)]
    return [Task(path, name, 0, size, size)]


def portions(tasks: Iterable[Task], as_text: tuple[str, ...] = ()) -> Iterator[Task]:
    """Return the same tasks, with packed files of lines read here into parts of about `TASK_BYTES`.

    Raises:
        DataError: such a file is damaged.
    """
    for task in tasks:
        if not has_rows(task.path, as_text) or task.path.suffix.lower() not in (".gz", ".zst"):
            yield task
            continue
        start = 0
        with _damage_is_named(task.path), _open(task.path) as file:
            while lines := tuple(file.readlines(TASK_BYTES)):
                yield task._replace(start=start, stop=start + len(lines), bytes=0, lines=lines)
                start += len(lines)
        # so that progress counts the bytes of the file
        yield task._replace(start=start, stop=start, lines=())


def documents(task: Task, columns: Columns, tokenizer: Tokenizer) -> Iterator[tuple[str, Document]]:
    """Yield name and text of each document of a task. Bytes that are no UTF-8 become replacement characters.

    Raises:
        DataError: the file is damaged, or a row does not fit the columns.
    """
    path = task.path
    with _damage_is_named(path):
        if not has_rows(path, getattr(columns, "as_text", ())):
            if columns.masks:
                raise DataError(
                    f"{path} has no rows, and {', '.join(columns.names)} are asked for; expected files with "
                    f"the ending {', '.join(ROW_ENDINGS)}: leave it out by a pattern"
                )
            yield task.name, Document(_plain_text(path))
            return
        for place, row in _rows(task, columns.names):
            if row is None:
                continue
            try:
                document = columns.document(row, tokenizer)
            except DataError as error:
                raise DataError(f"{path} at {place}: {error}") from None
            yield f"{task.name}:{place}", document


def rows(task: Task, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and columns of each row of a task, of a file with rows.

    Raises:
        DataError: the file is damaged, or lacks these columns.
    """
    with _damage_is_named(task.path):
        yield from ((f"{task.name}:{place}", row) for place, row in _rows(task, names) if row is not None)


@contextlib.contextmanager
def _damage_is_named(path: Path | HubFile) -> Iterator[None]:
    """Turn errors of file readers into errors that name the file."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        of_arrow = type(error).__module__.partition(".")[0] == "pyarrow"
        if may_pass(path, error) or not (of_arrow or isinstance(error, OSError | EOFError | zlib.error)):
            raise
        raise DataError(f"{path} cannot be read or unpacked: {said_by(error)}") from error


def _plain_text(path: Path | HubFile) -> str:
    with _open(path) as file:
        raw = file.read()
    if b"\0" in raw:
        raise DataError(f"{path} holds zero bytes, so it is no text; leave it out by a pattern")
    return raw.decode("utf-8", errors="replace")


def _open(path: Path | HubFile) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.open(path.open() if isinstance(path, HubFile) else path)  # pyright: ignore[reportReturnType]
    if suffix == ".zst":
        packed = path.open() if isinstance(path, HubFile) else str(path)
        return io.BufferedReader(_pyarrow().input_stream(packed, compression="zstd"))
    return path.open() if isinstance(path, HubFile) else path.open("rb")


def _rows(task: Task, names: list[str]) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Place and row; None for an empty line."""
    suffix = task.path.suffix.lower()
    if suffix == ".parquet":
        yield from _parquet_rows(task, names)
    elif suffix == ".arrow":
        batches = itertools.islice(_arrow_batches(task.path), task.start, task.stop)
        for number, batch in enumerate(batches, task.start):
            _require_columns(task.path, names, batch.schema.names)
            rows = batch.select(names).to_pylist()
            yield from ((f"{number}.{index}", row) for index, row in enumerate(rows))
    else:
        for position, line in _lines(task):
            yield str(position), _json_row(task.path, position, line)


def _parquet_rows(task: Task, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    file = _parquet(task.path)
    _require_columns(task.path, names, file.schema_arrow.names)
    rows = file.read_row_group(task.start, columns=names).to_pylist()
    yield from ((f"{task.start}.{index}", row) for index, row in enumerate(rows))


def _require_columns(path: Path | HubFile, names: list[str], columns: list[str]) -> None:
    if missing := [name for name in names if name not in columns]:
        raise DataError(f"{path} has no column {missing[0]!r}; it has {', '.join(columns)}")


def _lines(task: Task) -> Iterator[tuple[int, bytes]]:
    """Yield lines that start within the part, with the place of their first byte, or their number."""
    if task.lines is not None:
        yield from enumerate(task.lines, task.start)
        return
    if task.path.suffix.lower() in (".gz", ".zst"):
        with _open(task.path) as file:
            yield from enumerate(file)
        return
    with _open(task.path) as file:
        if task.start:
            file.seek(task.start - 1)
            file.readline()
        while (position := file.tell()) < task.stop:
            yield position, file.readline()


def _json_row(path: Path | HubFile, position: int, line: bytes) -> dict[str, Any] | None:
    if not line.strip():
        return None
    try:
        row = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} at {position}: no JSON: {error!r}; expected an object with columns in each line. If the "
            "file is one text, name its ending in `as_text` of a source of type 'files'"
        ) from None
    if not isinstance(row, dict):
        raise DataError(f"{path} at {position}: {type(row).__name__}, not an object with columns")
    return row  # pyright: ignore[reportUnknownVariableType]


def _arrow_batches(path: Path | HubFile) -> Iterator[Any]:
    """Yield the record batches of a stream, as `datasets` writes it, or of a file with an index."""
    pyarrow = _pyarrow()
    hub = isinstance(path, HubFile)
    with pyarrow.PythonFile(path.open()) if hub else pyarrow.memory_map(str(path)) as opened:
        try:
            file = pyarrow.ipc.open_file(opened)
            yield from (file.get_batch(number) for number in range(file.num_record_batches))
        except pyarrow.ArrowInvalid:
            opened.seek(0)
            yield from pyarrow.ipc.open_stream(opened)


def _parquet(path: Path | HubFile) -> Any:
    _pyarrow()
    from pyarrow.parquet import ParquetFile

    if isinstance(path, HubFile):
        return ParquetFile(path.open(ahead=False), metadata=_footer(path), pre_buffer=True)
    return ParquetFile(path)


@functools.lru_cache(FOOTERS)
def _footer(path: HubFile) -> Any:
    from pyarrow.parquet import ParquetFile

    return ParquetFile(path.open(ahead=False)).metadata


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise DataError(
            "reading .parquet, .arrow and .zst needs: pip install 'forge-data[parquet]'"
        ) from None
    return pyarrow
