"""How do the shards of all processes become the one output?

Working folder of `out`: `out.partial/rank-00000-of-00002/`, one shard a process. The output is written
beside them, put on the disk, and takes its name by one rename; then the working folder goes. A kill on the
way leaves either the shards, from which it is written again, or the output.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from forge_interp.errors import InterpError
from forge_interp.extraction.columns import Column, dtype_name
from forge_interp.extraction.formats import describe, format_of
from forge_interp.extraction.journal import check_same, committed_blocks, lock, read_chunks, read_spec

_SHARD = re.compile(r"rank-(\d{5})-of-(\d{5})")


def working_folder(out: Path) -> Path:
    """Return where the parts of an output lie until it is whole."""
    return out.with_name(f"{out.name}.partial")


def shard_folder(out: Path, rank: int, world_size: int) -> Path:
    """Return the folder of one process.

    Raises:
        InterpError: the working folder was begun with another number of processes.
    """
    working = working_folder(out)
    if others := _world_sizes(working) - {world_size}:
        raise InterpError(
            f"{working} was begun by {others.pop()} processes, now there are {world_size}; expected the same "
            "number: start as many, or delete it to start anew"
        )
    return working / f"rank-{rank:05d}-of-{world_size:05d}"


def merge(out: Path) -> bool:
    """Write `out` from its shards if all of them are sealed; True once it is there.

    Raises:
        InterpError: the shards do not belong together, or are damaged.
    """
    working = working_folder(out)
    if not working.is_dir():
        return out.exists()
    try:
        held = lock(working / "lock", math.inf)
    except FileNotFoundError:  # another process has just finished
        return out.exists()
    with held:
        if not out.exists():  # else another process was faster, or was killed before it had tidied up
            parts = _sealed_parts(working)
            if parts is None:
                return False
            _write(out, parts)
        shutil.rmtree(working, ignore_errors=True)
    return True


def missing_ranks(out: Path) -> list[int]:
    """Return the ranks whose shards are not sealed yet."""
    worlds = _world_sizes(working_folder(out))
    ranks = ((rank, shard_folder(out, rank, world)) for world in worlds for rank in range(world))
    return [rank for rank, folder in ranks if _sealed_rows(folder) is None]


class _Part(NamedTuple):
    folder: Path
    request: dict[str, Any]
    columns: tuple[Column, ...]
    rows: int


def _world_sizes(working: Path) -> set[int]:
    return {int(found[2]) for path in working.glob("rank-*") if (found := _SHARD.fullmatch(path.name))}


def _sealed_parts(working: Path) -> list[_Part] | None:
    """Return the shards in the order of their ranks, or None while some are not sealed."""
    folders = sorted(path for path in working.iterdir() if _SHARD.fullmatch(path.name))
    if not folders or len(folders) != int(folders[0].name[-5:]):
        return None
    parts = []
    for folder in folders:
        rows, spec = _sealed_rows(folder), read_spec(folder)
        if rows is None or spec is None:
            return None
        parts.append(_Part(folder, spec["request"], tuple(map(Column.from_json, spec["columns"])), rows))
    return parts


def _sealed_rows(folder: Path) -> int | None:
    """Return the number of rows of a shard, or None if it is not sealed."""
    rows = 0
    for chunk, _ in read_chunks(folder):
        if chunk is None:
            return rows
        rows += chunk.rows
    return None


def _write(out: Path, parts: list[_Part]) -> None:
    columns = next((part.columns for part in parts if part.columns), ())
    for part in parts:
        check_same(part.folder, part.request, parts[0].request)
        if part.columns not in (columns, ()):
            raise InterpError(
                f"{part.folder} holds {_list(part.columns)}, others hold {_list(columns)}; expected the "
                "same: the processes ran other models or inputs; delete the working folder to start anew"
            )

    def blocks(column: Column) -> Iterator[memoryview]:
        for part in parts:
            if part.rows:
                yield from committed_blocks(part.folder, columns, column)

    rows = sum(part.rows for part in parts)
    metadata = describe(columns, rows, parts[0].request)
    stage = working_folder(out) / "output"
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    try:
        written = format_of(out).write(stage / out.name, columns, rows, blocks, metadata)
        for folder in filter(Path.is_dir, stage.rglob("*")):
            _sync_names(folder)
        for path in written:
            os.rename(path, out.with_name(path.name))
    except OSError as error:
        shutil.rmtree(stage, ignore_errors=True)  # on a full disk, room for others
        error.add_note(
            f"{stage.parent} keeps all rows: mend this, call again, and {out} is written from them"
        )
        raise
    _sync_names(out.parent)


def _sync_names(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _list(columns: tuple[Column, ...]) -> str:
    return ", ".join(f"{c.name} {list(c.shape)} {dtype_name(c.dtype)}" for c in columns)
