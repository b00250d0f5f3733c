"""Tar files in the layout of webdataset: members that share a name up to its first dot are a sample."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge_data.error import DataError
from forge_data.sources.config import Split, sources
from forge_data.sources.documents import Task
from forge_data.sources.files import find_files
from msgspec import structs

from forge_vlm.samples.make import Rows
from forge_vlm.samples.rows import InFile
from forge_vlm.sources.columns import ImageTextConfig

IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "mp4", "webm", "mov", "mkv", "avi")


@sources.register("webdataset")
class WebdatasetConfig(ImageTextConfig):
    """Tars whose members share a name up to its first dot: `0001.jpg` with `0001.txt` or `0001.json`.

    A sample is a row: its images are the column `image`, in their order in the tar; the text of `.txt` is the
    column `text`, and the keys of `.json` are further columns. Images are read directly from the tar.

    Attributes:
        path: a tar, a folder or a pattern such as `shards/train-*.tar`; not the name of a hub data set.
    """

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        yield from super().contradictions()
        if given := [key for key in ("subset", "revision") if getattr(self, key) is not None]:
            yield f"{self.path}: given {given[0]}, which tars have not; leave it out"

    def rows(self) -> Rows:
        """See `ImageTextConfig.rows`."""
        return tar_rows

    def root_and_files(self, split: Split) -> tuple[Path, list[Path]]:
        """See `TextSourceConfig.root_and_files`."""
        own = split == "validation" and self.validation is not None
        files = find_files([(self.validation if own else None) or self.path])
        if strange := [file for file in files if file.suffix != ".tar"]:
            raise DataError(f"{strange[0]} is no .tar; name the tars by a pattern, unpacked ones")
        return Path(os.path.commonpath([file.parent for file in files])), files

    def whole(self) -> WebdatasetConfig:
        """See `SourceConfig.whole`."""
        return structs.replace(self, held_out=0.0)


def tar_rows(task: Task, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and columns of each sample of a tar.

    Raises:
        DataError: it is damaged.
    """
    path = Path(str(task.path))
    try:
        with tarfile.open(path, "r:") as tar:
            stem, row = "", dict[str, Any]()
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                start, _, ending = name.partition(".")
                if not member.isfile() or not start:
                    continue
                if (here := f"{folder}/{start}") != stem:
                    if row:
                        yield f"{task.name}:{stem.lstrip('/')}", row
                    stem, row = here, {}
                row |= _columns(tar, member, ending.lower(), path, row)
            if row:
                yield f"{task.name}:{stem.lstrip('/')}", row
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _columns(
    tar: tarfile.TarFile, member: tarfile.TarInfo, ending: str, path: Path, row: dict[str, Any]
) -> dict[str, Any]:
    """Return the columns that a member of a tar adds to its row."""
    last = ending.rpartition(".")[2]
    if last in IMAGES:
        return {"image": [*row.get("image", []), InFile(path, member.offset_data, member.size)]}
    if last not in ("txt", "json"):
        return {}
    file = tar.extractfile(member)
    assert file is not None
    text = file.read().decode("utf-8", errors="replace")
    if last == "txt":
        return {"text": text}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path}: {member.name} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}: {member.name} holds {type(found).__name__}; expected an object")
    return found
