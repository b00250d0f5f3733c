"""Which parts of an extraction are on disk, do they belong together, and is it whole?"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_interp.errors import InterpError
from forge_interp.extraction.parts import ROW_COLUMNS, Column, Part, dtype_name, dump, replacing

INDEX = "index.json"
_FORMAT = 2


class Parts:
    """The parts of one extraction.

    Args:
        folder: of them.
        request: what is asked.
    """

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        self.folder = folder
        self.request: dict[str, Any] = json.loads(dump(request))

    @property
    def index(self) -> dict[str, Any] | None:
        """Of the whole, if it is whole."""
        return read_index(self.folder)

    def path(self, number: int) -> Path:
        """Of a part."""
        return self.folder / f"part-{number:05d}.safetensors"

    def intact(self, start: int, stop: int | None) -> dict[int, Part]:
        """The parts [start, stop) that need not be written again; reads them.

        Raises:
            InterpError: they are of another call.
        """
        numbers = sorted(self._numbers())
        mine = [number for number in numbers if start <= number and (stop is None or number < stop)]
        found = {number: part for number in mine if (part := Part.read(self.path(number)))}
        for part in found.values():
            check_same(self.folder, part.request, self.request, {"versions"})
        found = {number: part for number, part in found.items() if part.is_intact}
        if self.index is None or len(found) < len(mine):  # rows of two versions are not to be mixed
            for part in found.values():
                check_same(self.folder, part.request, self.request)
        return found

    def remove(self, start: int, stop: int | None) -> None:
        """Forget parts [start, stop), and those that are of other calls."""
        (self.folder / INDEX).unlink(missing_ok=True)
        for number in self._numbers():
            part = Part.read(self.path(number))
            is_mine = start <= number and (stop is None or number < stop)
            if is_mine or part is None or part.request != self.request:
                self.path(number).unlink(missing_ok=True)

    def finish(self, total: int) -> bool:
        """Write the index if all parts are there; True once it is.

        Raises:
            InterpError: the parts do not belong together; lists the differences.
        """
        parts = [Part.read(self.path(number)) for number in range(total)]
        if self.index is None:
            if not total or None in parts:
                return False
            _write_index(self.folder, [part for part in parts if part])
        for left in self.folder.glob("*.safetensors.*.tmp"):  # of processes that were killed
            left.unlink(missing_ok=True)
        return True

    def _numbers(self) -> set[int]:
        return {int(path.stem[5:]) for path in self.folder.glob("part-*.safetensors")}


def missing_parts(folder: Path) -> list[int] | None:
    """The parts that are not there yet; None where it is not known how many there are to be."""
    present = {path: Part.read(path) for path in folder.glob("part-*.safetensors")}
    request = next((part.request for part in present.values() if part), None)
    if request is None or request["parts"] is None:
        return None
    paths = {number: Parts(folder, request).path(number) for number in range(request["parts"])}
    return [number for number, path in paths.items() if not present.get(path)]


def read_index(folder: Path) -> dict[str, Any] | None:
    """What `index.json` says; None where there is none.

    Raises:
        InterpError: it is damaged, or of another version.
    """
    path = folder / INDEX
    try:
        index = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        raise InterpError(f"{path} is damaged; expected JSON: delete it and extract again") from None
    if not isinstance(index, dict) or index.get("format") != _FORMAT:
        raise InterpError(f"{path} is no index of format {_FORMAT}; expected what forge-interp wrote")
    return index


def _write_index(folder: Path, parts: Sequence[Part]) -> None:
    first = parts[0]
    for part in parts:
        check_same(part.path, part.request, first.request)
        if part.columns != first.columns:
            raise InterpError(
                f"{part.path} holds {_list(part.columns)}, {first.path.name} holds {_list(first.columns)}; "
                "expected the same: the processes ran other models or inputs; give resume=False"
            )
    index = {
        "format": _FORMAT,
        "rows": sum(part.rows for part in parts),
        "sites": [column.name for column in first.columns if column.name not in ROW_COLUMNS],
        "dtypes": {column.name: dtype_name(column.dtype) for column in first.columns},
        "shapes": {column.name: list(column.shape) for column in first.columns},
        "parts": [{"rows": part.rows, "bytes": part.path.stat().st_size} for part in parts],
        "request": first.request,
    }
    _sync_names(folder)
    with replacing(folder / INDEX) as file:
        file.write(dump(index).encode())
    _sync_names(folder)


def check_same(
    place: Path, made: Mapping[str, Any], asked: Mapping[str, Any], but: Collection[str] = ()
) -> None:
    """Raise InterpError that lists the differences, unless `place` was made for the same request."""
    differences = [
        f"{name}: {_short(there)} there, {_short(here)} asked"
        for key in sorted((made.keys() | asked.keys()) - set(but))
        for name, there, here in _differences(key, made.get(key), asked.get(key))
    ]
    if differences:
        raise InterpError(
            f"{place} was made by another extraction ({'; '.join(differences)}); expected the same: give "
            "another out, or resume=False to replace it"
        )


def _differences(key: str, there: Any, here: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for name in sorted(there.keys() | here.keys()):
            yield from _differences(f"{key} {name}", there.get(name), here.get(name))
    elif there != here:
        yield key, there, here


def _sync_names(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _short(value: Any) -> str:
    text = dump(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _list(columns: Iterable[Column]) -> str:
    return ", ".join(f"{c.name} {list(c.shape)} {dtype_name(c.dtype)}" for c in columns)
