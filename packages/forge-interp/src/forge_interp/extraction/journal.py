"""How does one process put rows on disk so that a kill at any instant loses at most one chunk?

A shard is a folder: one raw file per column, only ever appended to; `spec.json`, what was asked and which
columns came of it; and `journal`, one line per committed chunk with the CRC-32 of what the chunk added to
each file. Rows count once their line is whole. Opening a shard checks every committed chunk, cuts the files
back to the last that is intact, and goes on from there, so that neither a kill nor a power failure needs a
flush per chunk. Whoever reads a shard checks it again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from forge_interp.errors import InterpError
from forge_interp.extraction.columns import BLOCK_BYTES, Column, as_bytes, fill, write_all
from forge_interp.extraction.formats import ROW_COLUMNS, dump

_LOCK_WAIT_S = 10.0


class Chunk(NamedTuple):
    """One line of the journal.

    Attributes:
        batch: number of the batch that it holds.
        rows: number of rows.
        inputs: CRC-32 of the inputs.
        crcs: CRC-32 of its bytes in each column, in the order of the columns.
    """

    batch: int
    rows: int
    inputs: int
    crcs: tuple[int, ...]


class Shard:
    """The rows of one process, being written.

    Args:
        folder: made if it is missing.
        request: what was asked; a folder made for another request is refused.

    Raises:
        InterpError: the folder belongs to another request, or another process is writing it.

    Attributes:
        columns: known from the first commit on.
        rows: committed so far.
        batches: committed so far, in number.
        sealed: all batches are in.
    """

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        self.folder = folder
        self.request = dict(request)
        self.columns: tuple[Column, ...] = ()
        self.rows = self.batches = 0
        self.sealed = False
        self._files: dict[str, Any] = {}
        self._pending: dict[str, tuple[Column, int, int]] = {}
        self._lock = None
        while self._lock is None:
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # another process has just finished, and removes the folder
                self._lock = lock(folder / "lock", _LOCK_WAIT_S)
        try:
            self._recover()
            self._journal = (folder / "journal").open("ab", buffering=0)
        except BaseException:
            self._lock.close()
            raise

    def write(self, name: str, values: Tensor) -> None:
        """Append rows [rows, ...] to a column; they count from the next `commit` on.

        Raises:
            InterpError: their dtype or the shape of a row is not that of the rows before.
        """
        column = Column(name, values.dtype, tuple(values.shape[1:]))
        known = {c.name: c for c in self.columns}.get(name)
        if self.columns and known != column:
            raise InterpError(_not_alike(column, known, self.columns))
        if name in self._pending:
            raise InterpError(
                f"{name} was captured twice in one batch; expected once: name one call, {name}#0"
            )
        if name not in self._files:
            self._files[name] = (self.folder / f"{column.file_name}.bin").open("ab", buffering=0)
        data = as_bytes(values)
        write_all(self._files[name], data)
        self._pending[name] = (column, len(values), zlib.crc32(data))

    def commit(self, inputs: int) -> None:
        """Make what was written since the last commit count, as the next batch.

        Args:
            inputs: CRC-32 of the inputs of the batch.

        Raises:
            InterpError: columns are missing, or differ in their number of rows.
        """
        self._check_pending()
        if not self.columns:
            self.columns = tuple(column for column, _, _ in self._pending.values())
            _write_spec(self.folder, self.request, self.columns)
        rows = self._pending[self.columns[0].name][1]
        crcs = tuple(self._pending[column.name][2] for column in self.columns)
        _append(self._journal, list(Chunk(self.batches, rows, inputs, crcs)))
        self._pending = {}
        self.rows, self.batches = self.rows + rows, self.batches + 1

    def seal(self) -> None:
        """Declare that all batches are in."""
        if not self.columns:
            _write_spec(self.folder, self.request, ())
        if not self.sealed:
            _append(self._journal, ["sealed", self.batches, self.rows])
            self.sealed = True

    def close(self) -> None:
        """Close all files; the shard can be opened again."""
        for file in [*self._files.values(), self._journal, self._lock]:
            file.close()

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Close; a shard that failed before its first commit leaves nothing behind."""
        if isinstance(error, OSError) and self.batches:
            error.add_note(
                f"{self.folder} keeps {self.batches} batches: mend this, call again, and it goes on"
            )
        if kind is not None and not self.batches:
            shutil.rmtree(self.folder, ignore_errors=True)
            with suppress(OSError):
                self.folder.parent.rmdir()
        self.close()

    def _check_pending(self) -> None:
        missing = [column.name for column in self.columns if column.name not in self._pending]
        if missing:
            raise InterpError(
                f"batch {self.batches} captured nothing at {', '.join(missing)}; expected the sites of the "
                "first batch: extract sites that not every batch reaches in a call of their own"
            )
        rows = {name: count for name, (_, count, _) in self._pending.items()}
        if len(set(rows.values())) != 1:
            raise InterpError(
                f"batch {self.batches} has rows {rows}; expected one number: extract sites with other rows "
                "in a call of their own, or pool"
            )

    def _recover(self) -> None:
        """Go back to the last chunk that is whole."""
        spec = read_spec(self.folder)
        if spec is not None:
            check_same(self.folder, spec["request"], self.request)
            self.columns = tuple(map(Column.from_json, spec["columns"]))
        keep = 0
        for chunk, end in _intact_chunks(self.folder, self.columns):
            if chunk is None:
                self.sealed = True
            else:
                self.rows, self.batches = self.rows + chunk.rows, self.batches + 1
            keep = end
        journal = self.folder / "journal"
        if journal.exists():
            os.truncate(journal, keep)
        sizes = {f"{column.file_name}.bin": self.rows * column.row_bytes for column in self.columns}
        for path in self.folder.glob("*.bin"):
            os.truncate(path, sizes.get(path.name, 0))


def lock(path: Path, wait_s: float) -> Any:
    """Hold a lock file, until it is closed or the process ends; processes that it forks do not hold it.

    Raises:
        InterpError: another process holds it for longer than that.
        FileNotFoundError: its folder is gone.
    """
    deadline = time.monotonic() + wait_s
    while True:
        file = path.open("a")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file  # else the one who held it has removed it: take the file that is there now
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise InterpError(
                    f"{path.parent} is being written by another process; expected one writer: wait for it, "
                    "or give every process its own rank"
                ) from None
            time.sleep(0.05)
        file.close()


def _write_spec(folder: Path, request: Mapping[str, Any], columns: tuple[Column, ...]) -> None:
    """Write what was asked and what came of it, whole or not at all; without it no row can be read."""
    partial = folder / "spec.json.new"
    with partial.open("w") as file:
        file.write(dump({"request": request, "columns": [column.to_json() for column in columns]}))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / "spec.json")


def read_spec(folder: Path) -> dict[str, Any] | None:
    """Return {request, columns} of a shard, or None before its first commit."""
    path = folder / "spec.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        raise InterpError(f"{path} is damaged; expected JSON: delete {folder} and extract again") from None


def check_same(place: Path, made: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raise InterpError that lists the differences, unless `place` was made for the same request."""
    asked = json.loads(dump(asked))
    differences = [
        f"{key}: {_short(made.get(key))} there, {_short(asked.get(key))} asked"
        for key in sorted(made.keys() | asked.keys())
        if made.get(key) != asked.get(key)
    ]
    if differences:
        raise InterpError(
            f"{place} was made by another extraction ({'; '.join(differences)}); expected the same: give "
            "another out, or delete it to start anew"
        )


def read_chunks(folder: Path) -> Iterator[tuple[Chunk | None, int]]:
    """Read the whole lines of a journal: a chunk, or None for the seal, and the byte where the line ends."""
    end = expected = 0
    try:
        file = (folder / "journal").open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            end += len(line)
            crc, _, text = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or crc != b"%08x" % zlib.crc32(text):
                return
            fields = json.loads(text)
            if fields[0] == "sealed":
                yield None, end
                return
            chunk = Chunk(*fields[:-1], crcs=tuple(fields[-1]))
            if chunk.batch != expected:
                return
            expected += 1
            yield chunk, end


def committed_blocks(folder: Path, columns: tuple[Column, ...], column: Column) -> Iterator[memoryview]:
    """Read the committed bytes of a column, each block valid until the next, and check them on the way.

    Raises:
        InterpError: they are not those that were committed.
    """
    buffer = memoryview(bytearray(BLOCK_BYTES))
    index = columns.index(column)
    path = folder / f"{column.file_name}.bin"
    if not path.exists():
        return
    with path.open("rb", buffering=0) as file:
        for chunk, _ in read_chunks(folder):
            if chunk is None:
                return
            left, crc = chunk.rows * column.row_bytes, 0
            while left:
                block = buffer[: min(left, BLOCK_BYTES)]
                fill(file, block, path)
                crc, left = zlib.crc32(block, crc), left - len(block)
                yield block
            if crc != chunk.crcs[index]:
                raise InterpError(
                    f"{path}: batch {chunk.batch} is not what was written there; the disk or a program "
                    "changed it: run the extraction again, it goes on from the last batch that is whole"
                )


def _intact_chunks(folder: Path, columns: tuple[Column, ...]) -> Iterator[tuple[Chunk | None, int]]:
    """Read the journal up to the first chunk whose bytes are not all there."""
    buffer = memoryview(bytearray(BLOCK_BYTES))
    files: list[Any] = []
    try:
        for chunk, end in read_chunks(folder):
            if not columns:
                return
            files = files or [
                (folder / f"{column.file_name}.bin").open("rb", buffering=0) for column in columns
            ]
            if chunk and any(
                _crc(file, chunk.rows * column.row_bytes, buffer) != crc
                for file, column, crc in zip(files, columns, chunk.crcs, strict=True)
            ):
                return
            yield chunk, end
    except FileNotFoundError:
        return
    finally:
        for file in files:
            file.close()


def _crc(file: Any, size: int, buffer: memoryview) -> int:
    """CRC-32 of the next `size` bytes, or -1 where the file ends before."""
    crc = 0
    while size:
        got = file.readinto(buffer[: min(size, BLOCK_BYTES)])
        if not got:
            return -1
        crc, size = zlib.crc32(buffer[:got], crc), size - got
    return crc


def _append(journal: Any, fields: list[Any]) -> None:
    text = dump(fields).encode()
    write_all(journal, b"%08x %s\n" % (zlib.crc32(text), text))


def _short(value: Any) -> str:
    text = dump(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _not_alike(column: Column, known: Column | None, columns: tuple[Column, ...]) -> str:
    if known is None:
        sites = ", ".join(c.name for c in columns if c not in ROW_COLUMNS)
        return (
            f"{column.name} was captured, but not in the first batch; expected its sites ({sites}): extract "
            "sites that not every batch reaches in a call of their own"
        )
    return (
        f"{column.name} has rows {list(column.shape)} {column.dtype}, those before have {list(known.shape)} "
        f"{known.dtype}; expected one shape: cut or pad them to it with select, or pool"
    )
