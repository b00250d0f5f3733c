"""Which parts of an extraction are on disk, do they belong together, and is the extraction complete?"""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_interp.errors import InterpError
from forge_interp.extraction.run.identity import is_same_but_for_rounding
from forge_interp.extraction.run.parts import Part, dtype_name, dump, is_site, listed, replacing

INDEX = "index.json"
_FORMAT = 2
_ENTRIES = {"rows", "sites", "dtypes", "shapes", "parts", "request"}


class Parts:
    """The parts of one extraction in a folder, made for one request."""

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        self.folder = folder
        self.request_text = dump(request)
        self.request: dict[str, Any] = json.loads(self.request_text)

    @property
    def index(self) -> dict[str, Any] | None:
        """The content of `index.json`; None while parts are missing; InterpError where it is damaged."""
        path = self.folder / INDEX
        try:
            index = json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:
            raise InterpError(f"{path} is damaged; expected JSON: delete it and extract again") from None
        if not isinstance(index, dict) or index.get("format") != _FORMAT or not index.keys() >= _ENTRIES:
            raise InterpError(f"{path} is no index of format {_FORMAT}; expected what forge-interp wrote")
        return index

    def path(self, number: int) -> Path:
        """Return the path of a part."""
        return self.folder / f"part-{number:05d}.safetensors"

    def numbers(self) -> list[int]:
        """Return the numbers of the parts that have a file."""
        return sorted({int(path.stem[5:]) for path in self.folder.glob("part-*.safetensors")})

    def intact(self, start: int, stop: int | None) -> dict[int, Part]:
        """Return the intact parts in [start, stop); InterpError if parts belong to another call."""
        mine = [number for number in self.numbers() if start <= number and (stop is None or number < stop)]
        found = {number: part for number in mine if (part := Part.read(self.path(number)))}
        index = self.index
        for request in [part.request for part in found.values()] + ([index["request"]] if index else []):
            check_same(self.folder, request, self.request, {"versions"})
        found = {number: part for number, part in found.items() if part.is_intact}
        if index is None or len(found) < len(mine):
            for part in found.values():  # rows of two versions are not to be mixed
                check_same(self.folder, part.request, self.request)
            (self.folder / INDEX).unlink(missing_ok=True)  # it is no longer whole
        return found

    def remove(self, start: int, stop: int | None) -> None:
        """Delete parts [start, stop), and all parts of other calls."""
        (self.folder / INDEX).unlink(missing_ok=True)
        for number in self.numbers():
            part = Part.read(self.path(number))
            is_mine = start <= number and (stop is None or number < stop)
            if is_mine or part is None or differences(part.request, self.request):
                self.path(number).unlink(missing_ok=True)

    def finish(self, total: int) -> bool:
        """Write the index if all parts exist; True once it is written. InterpError lists how parts differ."""
        if self.index is None:
            found = [Part.read(self.path(number)) for number in range(total)]
            parts = [part for part in found if part is not None]
            if not total or len(parts) < total:
                return False
            self._write_index(parts)
        for left in self.folder.glob("*.tmp"):  # of processes that were killed
            left.unlink(missing_ok=True)
        return True

    def _write_index(self, parts: list[Part]) -> None:
        first = parts[0]
        for part in parts:
            check_same(part.path, part.request, first.request)
            if part.columns != first.columns:
                raise InterpError(
                    f"{part.path} holds {listed(part.columns)}, {first.path.name} holds "
                    f"{listed(first.columns)}; expected the same: the processes ran other models or inputs; "
                    "give resume=False"
                )
        index = {
            "format": _FORMAT,
            "rows": sum(part.rows for part in parts),
            "sites": [column.name for column in first.columns if is_site(column.name)],
            "dtypes": {column.name: dtype_name(column.dtype) for column in first.columns},
            "shapes": {column.name: column.shape for column in first.columns},
            "parts": [{"rows": part.rows, "bytes": part.path.stat().st_size} for part in parts],
            "request": first.request,
        }
        _sync_names(self.folder)
        with replacing(self.folder / INDEX) as file:
            file.write(dump(index).encode())
        _sync_names(self.folder)

    def missing(self) -> list[int] | None:
        """Return the numbers of missing parts; None where their total is unknown."""
        present = {number: part for number in self.numbers() if (part := Part.read(self.path(number)))}
        total = next((part.request["parts"] for part in present.values()), None)
        return None if total is None else [number for number in range(total) if number not in present]

    def whole(self) -> dict[str, Any]:
        """Return the index if the extraction is complete; else InterpError says what is missing."""
        index = self.index
        for number, part in enumerate(index["parts"] if index else ()):
            path = self.path(number)
            if not path.is_file() or path.stat().st_size != part["bytes"]:
                raise InterpError(f"{path} is missing or damaged: call the extraction again")
        if index is not None:
            return index
        if not self.folder.exists():
            raise InterpError(f"{self.folder} does not exist; expected a folder that an extraction wrote")
        if not self.numbers():
            raise InterpError(f"{self.folder} has no {INDEX}; expected a folder that an extraction wrote")
        missing = self.missing()
        if missing == []:
            raise InterpError(f"{self.folder} is not whole yet; all parts are there: call finish_extraction")
        some = "more parts" if missing is None else f"parts {', '.join(map(str, missing[:8]))}"
        raise InterpError(
            f"{self.folder} is not whole yet: it waits for {some}; run the extraction again to go on"
        )


def check_same(
    place: Path, made: Mapping[str, Any], asked: Mapping[str, Any], but: Collection[str] = ()
) -> None:
    """Raise InterpError that lists the differences, unless `place` was made for the same request."""
    if found := differences(made, asked, but):
        raise InterpError(
            f"{place} was made by another extraction ({'; '.join(found)}); expected the same: give another "
            "out, or resume=False to replace it; where a model gives other rows each time, identity= helps"
        )


def differences(made: Mapping[str, Any], asked: Mapping[str, Any], but: Collection[str] = ()) -> list[str]:
    """List how two requests differ; the rows of their first and last batches may differ by rounding."""
    rows = [request.get("outputs") or {} for request in (made, asked)]
    but = {*but, "outputs"}
    made, asked = ({k: v for k, v in of.items() if k not in but} for of in (made, asked))
    found = list(_differences("", made, asked))
    for batch in sorted({**rows[0], **rows[1]}):
        there, here = (of.get(batch, {}) for of in rows)
        names = dict.fromkeys([*there, *here])
        if sites := [x for x in names if not is_same_but_for_rounding(there.get(x), here.get(x))]:
            found.append(f"other rows {batch} at {', '.join(sites[:4])}{' ...' if len(sites) > 4 else ''}")
    return found


def _differences(key: str, there: Any, here: Any) -> Iterator[str]:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for name in sorted(there.keys() | here.keys()):
            yield from _differences(f"{key} {name}".strip(), there.get(name), here.get(name))
    elif there != here:
        texts = (text if len(text) <= 80 else f"{text[:77]}..." for text in map(dump, (there, here)))
        yield "{}: {} there, {} asked".format(key, *texts)


def _sync_names(folder: Path) -> None:
    """Write the file names of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
