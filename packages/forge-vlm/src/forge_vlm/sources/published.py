"""Data sets in the form in which their authors publish them: COCO with Karpathy's splits, WebVid."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from forge_data.error import DataError
from forge_data.packing.packing import Packing
from forge_data.sources.config import Opening, Split, sources
from forge_data.sources.documents import Task
from forge_data.sources.files import find_files
from msgspec import structs

from forge_vlm.samples.make import Rows
from forge_vlm.sources.columns import ImageTextConfig

KarpathySplit = Literal["train", "val", "test"]


@sources.register("coco-karpathy")
class CocoKarpathyConfig(ImageTextConfig):
    """`dataset_coco.json` of Karpathy and Fei-Fei (arXiv:1412.2306): each caption of an image is a sample.

    Attributes:
        path: path of that file.
        root: the folder with `train2014` and `val2014`; absent means that of the file.
        split: `train`, which includes `restval` of the file, `val` or `test`.
        validation: the split for validation.
    """

    split: KarpathySplit = "train"  # type: ignore[assignment]
    validation: KarpathySplit | None = "val"  # type: ignore[assignment]

    def packing(self, opening: Opening) -> Packing:
        """See `SourceConfig.packing`."""
        if opening.split == "validation" and self.validation is not None:
            config = structs.replace(self, split=self.validation, validation=None, held_out=0.0)
            return config.packing(replace(opening, split="train"))
        return super().packing(opening)

    def root_and_files(self, split: Split) -> tuple[Path, list[Path]]:
        """See `TextSourceConfig.root_and_files`: one file has all splits."""
        (file,) = find_files([self.path])
        return file.parent, [file]

    def rows(self) -> Rows:
        """See `ImageTextConfig.rows`."""
        return partial(karpathy_rows, split=self.split)

    def tasks(self, file: Path, root: Path) -> list[Task]:
        """See `HfConfig.tasks`."""
        return whole(file, root)


@sources.register("webvid")
class WebVidConfig(ImageTextConfig):
    """Tables (.csv) with a clip in each row, as in WebVid (arXiv:2104.00650); see `[model.video]`.

    Attributes:
        path: a table, a folder of them or a pattern.
        root: the folder with the clips; absent means that of the table.
        clip: pattern for the path of a clip, from the columns of its row; `{videoid:.3}` are the first three
            letters.
        text: the column with the caption.
    """

    clip: str = "{page_dir}/{videoid}.mp4"
    text: str | None = "name"

    def rows(self) -> Rows:
        """See `ImageTextConfig.rows`."""
        return partial(table_rows, clip=self.clip)

    def tasks(self, file: Path, root: Path) -> list[Task]:
        """See `HfConfig.tasks`."""
        return whole(file, root)


def whole(file: Path, root: Path) -> list[Task]:
    """Return the task of reading a complete file."""
    size = file.stat().st_size
    return [Task(file, file.relative_to(root).as_posix(), 0, size, size)]


def karpathy_rows(task: Task, names: list[str], split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and columns of each caption of a split.

    Raises:
        DataError: the file does not have that form.
    """
    wanted = ("train", "restval") if split == "train" else (split,)
    try:
        for image in json.loads(Path(str(task.path)).read_bytes())["images"]:
            if image["split"] not in wanted:
                continue
            file = f"{image['filepath']}/{image['filename']}"
            for number, sentence in enumerate(image["sentences"]):
                yield f"{task.name}:{image['filename']}#{number}", {"image": file, "text": sentence["raw"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{task.path} is not of the form of dataset_coco.json ({type(error).__name__}: {error})"
        ) from None


def table_rows(task: Task, names: list[str], clip: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and columns of each row of a table, with its clip as `image`.

    Raises:
        DataError: the table is damaged, or lacks a column.
    """
    try:
        with Path(str(task.path)).open(newline="", encoding="utf-8-sig") as file:
            for number, row in enumerate(csv.DictReader(file)):
                # fields without a column are under None, and columns without a field hold it
                if None in row or None in row.values():
                    raise DataError(
                        f"{task.path}, row {number}: other fields than columns; is a comma not in quotes?"
                    )
                yield f"{task.name}:{number}", row | {"image": clip.format(**row)}
    except KeyError as error:
        raise DataError(f"{task.path} has no column {error}, which clip = {clip!r} names") from None
    except (IndexError, AttributeError) as error:
        raise DataError(f"clip = {clip!r} is no pattern of columns: {error}") from None
    except DataError:
        raise
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{task.path} cannot be read as a table: {error}") from None
