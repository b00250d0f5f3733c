"""From rows to samples by several processes; the result does not depend on their number. Needs forge-data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from forge_data.error import DataError
from forge_data.sources.columns import named
from forge_data.sources.documents import Task, portions, rows
from forge_data.sources.items import ItemReader, Size
from forge_data.store.tokenize import Held, Making, cores, in_order, place
from forge_data.tokenizer.encoding import encoded
from forge_data.tokenizer.tokenizer import Tokenizer, TokenizerConfig

from forge_vlm.images.marks import MarkedTokenizer, with_places
from forge_vlm.images.processing import decoded
from forge_vlm.images.video import frames_of, is_video
from forge_vlm.samples.rows import Image, InFile, RowLayout
from forge_vlm.samples.store import Prepared, SampleWriter, Unreadable, read_file

NAMED = 5
"""Number of damaged images that are named."""

Rows = Callable[[Task, list[str]], Iterator[tuple[str, dict[str, Any]]]]


class Preparation(NamedTuple):
    """How rows become samples.

    Attributes:
        layout: layout of a row.
        tokenizer: tokenizer of its text.
        reader: reader of its images.
        held: which rows are taken.
        decode: whether every image is decoded; otherwise only the header of its file is read.
        skip: whether samples with a damaged image are left out; otherwise they are an error.
        rows: reads a part of a file.
    """

    layout: RowLayout
    tokenizer: TokenizerConfig
    reader: ItemReader
    held: Held
    decode: bool
    skip: bool
    rows: Rows = rows

    def named(self, tokenizer: Tokenizer) -> tuple[Any, ...]:
        """Return the settings that decide about the samples, except the split and the image reader."""
        layout = self.layout
        options = sorted(
            getattr(self.rows, "keywords", {}).items()
        )  # of a `partial`: other options, other rows
        where = layout.images, layout.texts, layout.mark, str(layout.root)
        return named(layout.columns, tokenizer), *where, self.decode, self.skip, *options


class _Made(NamedTuple):
    samples: list[Prepared]
    damaged: list[str]
    empty: int


def make_samples(tasks: Sequence[Task], folder: Path, how: Preparation, making: Making, what: str) -> None:
    """Write the samples of files into a folder, which must not exist.

    Args:
        tasks: parts of files of rows.
        folder: folder of the samples; see `SampleStore`.
        how: how rows become samples.
        making: number of processes, and messages.
        what: subject of messages.

    Raises:
        DataError: a file or an image is damaged, a row does not have the layout, or no sample is left.
    """
    total, done = sum(task.bytes for task in tasks), 0
    files = len({task.path for task in tasks})
    say, damaged, empty = making.saying(what), list[str](), 0
    workers = making.workers or (cores() if total > 16 << 20 else 1)
    with SampleWriter(folder) as writer:
        for task, made in in_order(partial(_made_of, how=how), portions(tasks, as_text=(".csv",)), workers):
            for sample in made.samples:
                writer.add(sample)
            damaged, empty, done = damaged + made.damaged, empty + made.empty, done + task.bytes
            say(done, total)
        if not (writer.samples or damaged or empty) and how.held.fraction:
            rows = (row for task in portions(tasks, (".csv",)) for row in how.rows(task, how.layout.names))
            raise how.held.takes_none_of([place(name) for name, _ in rows], "sample")
        if not writer.samples:
            raise DataError(
                f"there is no sample in {files} files ({len(damaged)} damaged, {empty} without text)"
            )
        if not writer.has_targets:
            raise DataError(
                f"none of {writer.samples} samples has a target, so that nothing would be learnt; name the "
                "column with what the model is to write, or the roles whose words are targets"
            )
        writer.publish(len(damaged))
    passed = f", {empty:,} rows without text passed over" if empty else ""
    sys.stderr.write(f"{what}: {writer.samples:,} samples of {files:,} files{passed}\n")
    if not writer.images:
        column = how.layout.images
        sys.stderr.write(f"{what}: none of these samples has an image: nothing is in the column {column!r}\n")
    if damaged:
        listed = "; ".join(damaged[:NAMED]) + ("; ..." if len(damaged) > NAMED else "")
        sys.stderr.write(f"{what}: {len(damaged):,} samples with damaged images left out: {listed}\n")


_built: dict[TokenizerConfig, Tokenizer] = {}


def _made_of(task: Task, how: Preparation) -> _Made:
    if how.tokenizer not in _built:
        _built[how.tokenizer] = how.tokenizer.build()
    made = _Made([], [], 0)
    for name, row in how.rows(task, how.layout.names):
        if not how.held.takes(name):
            continue
        try:
            sample = sample_of(name, row, Path(str(task.path)).parent, how, _built[how.tokenizer])
        except Damaged as error:
            made.damaged.append(str(error))
            continue
        if sample is None:
            made = made._replace(empty=made.empty + 1)
        else:
            made.samples.append(sample)
    return made


class Damaged(Exception):
    """A row has a damaged image and is to be left out."""


def sample_of(
    name: str, row: dict[str, Any], folder: Path, how: Preparation, tokenizer: Tokenizer
) -> Prepared | None:
    """Return the sample of a row; None if it has no text.

    Args:
        name: name of the row.
        row: columns of the row.
        folder: folder of its file.
        how: how rows become samples.
        tokenizer: the tokenizer of `how`, built.

    Raises:
        DataError: an image is damaged, or the row does not have the layout.
        Damaged: an image is damaged, and such samples are to be left out.
    """
    try:
        images = how.layout.images_of(row, folder)
        sizes = [_measured(image, how) for image in images]
    except Unreadable as error:
        raise DataError(f"{name}: {error}") from None
    except ValueError as error:  # an error of data is one
        message = f"{name}: {error}"
        raise Damaged(message) if how.skip else DataError(message) from None
    try:
        return prepared(name, row, images, sizes, how, tokenizer)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None


def prepared(
    name: str,
    row: dict[str, Any],
    images: Sequence[Image],
    sizes: Sequence[Size],
    how: Preparation,
    tokenizer: Tokenizer,
) -> Prepared | None:
    """Return the sample of a row whose images were measured; None if it has no text.

    Raises:
        DataError: the number of image marks in its text differs from its number of images.
    """
    marked: Any = MarkedTokenizer(tokenizer)
    document = how.layout.document(row, tokenizer)
    if not document.text:
        return None
    ids, targets = encoded(marked, document, masks=True)
    assert targets is not None
    if (found := int((ids == marked.place_id).sum())) != len(images):
        raise DataError(f"its tokens have {found} marks of images, and it has {len(images)} images")
    layouts = [how.reader.layout(size) for size in sizes]
    tokens, of = with_places(ids, marked.place_id, layouts, tokenizer)
    return Prepared(name, tokens, (targets & (ids != marked.place_id))[of], images, sizes)


def _measured(image: Image, how: Preparation) -> Size:
    raw = read_file(image) if isinstance(image, InFile) else image
    size = how.reader.measure(raw)
    if how.decode and is_video(raw):
        frames_of(raw, size.frames)
    elif how.decode:
        decoded(raw)
    return size


def key_of(files: Sequence[Path], root: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of the last change of each file, which name the samples."""
    return [(str(f.relative_to(root)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]


def image_reader(items: ItemReader | None) -> ItemReader:
    """Return the image reader of a model.

    Raises:
        DataError: the model reads no images.
    """
    if items is None:
        raise DataError('a source of images, and a model that takes none; use model.type = "vision-language"')
    return items
