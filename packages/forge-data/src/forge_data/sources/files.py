"""The files that paths stand for, and the files of a folder that belong to a split. Imports no torch."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from forge_data.error import DataError
from forge_data.sources.documents import has_rows

ABOUT = re.compile(
    r"(readme|license|licence|notice|citation)(\..*)?|(dataset_infos?|dataset_dict|state)\.json",
    re.IGNORECASE,
)
"""Files that tell about a data set, and hold none of it."""

SPLITS = {
    "train": "train|training",
    "test": "test|testing|eval|evaluation",
    "validation": "validation|valid|val|dev",
}
"""Words in the names of folders and files of a split, as `datasets` reads them."""

SHARD = re.compile(r"(\w+)-\d{5}-of-\d{5}")


def walk(root: Path, takes: Callable[[str], bool], left_out: set[str]) -> Iterator[Path]:
    """Yield the files below a folder; excluded folders are not even listed."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        yield from (Path(folder, name) for name in names if takes(name))


def find_files(paths: list[str]) -> list[Path]:
    """Return the files that names, folders and patterns stand for, sorted.

    Raises:
        DataError: one of them stands for nothing, or a name is no file: a link to nowhere, a pipe.
    """
    found: set[Path] = set()
    for path in paths:
        here: set[Path] = set()
        for name in [path] if path and Path(path).exists() else _matches(path):
            here |= {_real(f) for f in (_below(Path(name)) if Path(name).is_dir() else [Path(name)])}
        if not here:
            raise DataError(
                f"there are no files at {path} (from {Path.cwd()}); give files, folders or patterns"
            )
        found |= here
    # A pattern with ** follows a link in a circle until the system refuses; that end is a folder.
    if wrong := sorted(str(file) for file in found if not (file.is_file() or file.is_dir())):
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise DataError(
            f"{wrong[0]}{more} is no file that can be read (a link that leads nowhere, a pipe, a socket); "
            "mend or remove it, or leave it out by a pattern"
        )
    return sorted(file for file in found if file.is_file())


def _below(folder: Path) -> Iterator[Path]:
    """Files below a folder, also behind links, each folder once.

    Raises:
        DataError: a folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be listed: {error.strerror}; leave it out by a pattern")

    seen = {os.path.realpath(folder)}
    for at, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        wanted = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        real = {name: os.path.realpath(Path(at, name)) for name in wanted}
        folders[:] = [name for name in wanted if real[name] not in seen]
        seen.update(real.values())
        yield from (Path(at, name) for name in names if not name.startswith("."))


def _real(file: Path) -> Path:
    """Return the file behind a link, unless only the name of the link shows the kind of the file."""
    real = Path(os.path.realpath(file))
    return real if real.suffix == file.suffix else file.absolute()


def _matches(pattern: str) -> list[str]:
    """Return the files of a pattern. Its leading folders are taken literally, brackets in them too."""
    parts = Path(pattern).parts
    start = Path()
    while len(parts) > 1 and (start / parts[0]).is_dir():
        start, parts = start / parts[0], parts[1:]
    found = glob.glob(str(Path(*parts)), root_dir=start, recursive=True)
    return [str(start / name) for name in found]


def files_of_split(folder: Path, split: str | None) -> list[Path]:
    """Return the files of a folder that hold the rows of a split; names ignored files on standard error.

    Names tell the split, as for `datasets`: `train` in the name of a folder or file below `folder`, or
    `train_sft-00000-of-00003.parquet`. If no name does, all is the split `train`. None is every split.

    Raises:
        DataError: the folder has other splits only, or other files beside files with rows.
    """
    found = find_files([str(folder)])
    if not any(has_rows(file) and not ABOUT.fullmatch(file.name) for file in found):
        if split not in ("train", None):
            raise DataError(
                f"given split = {split!r} of {folder}, whose files have no rows; expected 'train'"
            )
        return found
    about = [file for file in found if ABOUT.fullmatch(file.name)]
    rows = [file for file in found if file not in about]
    if strange := [file for file in rows if not has_rows(file)]:
        raise DataError(
            f"{strange[0]} has no rows, other files of {folder} have; name the files to be read by a pattern"
        )
    named = {file: _split_in(file, folder) if split is not None else None for file in rows}
    names = sorted({name for name in named.values() if name is not None})
    if names and split not in names:
        raise DataError(f"given split = {split!r}; the files of {folder} are those of {', '.join(names)}")
    if names and (unclear := [file for file, name in named.items() if name is None]):
        raise DataError(
            f"{unclear[0]} is of no split by its name, other files of {folder} are of {', '.join(names)}; "
            "name the files to be read by a pattern"
        )
    if not names and split not in ("train", None):
        raise DataError(f"given split = {split!r}; no name in {folder} says which files those are")
    taken = [file for file in rows if named[file] in (None, split)]
    if passed := [str(file.name) for file in about] + sorted({name for name in names if name != split}):
        sys.stderr.write(f"{folder}: passed over: {', '.join(passed)}\n")
    return taken


def _split_in(file: Path, folder: Path) -> str | None:
    """Return the split in the name of a file, or of a folder above it."""
    name = file.name.partition(".")[0]
    if (shard := SHARD.fullmatch(name)) and shard[1] != "data":
        return shard[1]
    above = file.relative_to(folder).parent.parts if file.is_relative_to(folder) else ()
    for part in (name, *reversed(above)):
        for split, words in SPLITS.items():
            if re.search(rf"(?<![a-zA-Z])({words})(?![a-zA-Z])", part, re.IGNORECASE):
                return split
    return None
