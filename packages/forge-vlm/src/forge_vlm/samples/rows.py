"""From a row to a text with marks and the images at these marks. Needs forge-data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from forge_data.error import DataError
from forge_data.sources.columns import Columns, Document, MessagesColumn, PromptColumns
from forge_data.tokenizer.tokenizer import Tokenizer

from forge_vlm.images.marks import MARK

SPEAKERS = {"human": "user", "gpt": "assistant"}
"""Roles of speakers in conversations of LLaVA, whose messages have the keys `from` and `value`."""


class InFile(NamedTuple):
    """An image that is part of a file.

    Attributes:
        path: path of the file.
        offset: index of its first byte.
        length: number of its bytes; -1 means all from `offset` on.
    """

    path: Path
    offset: int = 0
    length: int = -1


Image = bytes | InFile


class RowLayout(NamedTuple):
    """Which columns of a row are images, and where they stand in its text.

    Attributes:
        columns: columns of the text.
        images: the column with an image, or a list of them.
        texts: the column with the texts of an interleaved document, where null stands for the next image.
        mark: text that marks the place of an image.
        root: folder of relative image file names; None means that of the rows.
    """

    columns: Columns
    images: str = "image"
    texts: str | None = None
    mark: str = MARK
    root: Path | None = None

    @property
    def names(self) -> list[str]:
        """The columns that are read."""
        return [self.images, self.texts] if self.texts else [*self.columns.names, self.images]

    def document(self, row: dict[str, Any], tokenizer: Tokenizer) -> Document:
        """Return the text with a `MARK` for each image.

        Raises:
            DataError: the row lacks these columns, or has another number of images than marks.
        """
        count = len(_listed(row.get(self.images)))
        if self.texts:
            document = Document(_interleaved(row, self.texts))
        else:
            document = self.columns.document(self._marked(row, count), tokenizer)
        if self.mark != MARK:
            document = _replaced(document, self.mark)
        found = document.text.count(MARK)
        if found != count:
            raise DataError(f"its text has {found} marks {self.mark}, and it has {count} images")
        inside = {
            place for at in _found(document.text, MARK) for place in range(at, at + len(MARK))
        }  # a mark is one whoever wrote it
        return document._replace(spelled=tuple(place for place in document.spelled if place not in inside))

    def images_of(self, row: Mapping[str, Any], folder: Path) -> list[Image]:
        """Return the images of a row.

        Args:
            row: columns of the row.
            folder: folder of its file.

        Raises:
            DataError: one of them is no image, or its file does not exist.
        """
        return [_image(value, self.root or folder) for value in _listed(row.get(self.images))]

    def _marked(self, row: dict[str, Any], count: int) -> dict[str, Any]:
        """Return the row with a mark for each image; a text without marks gets them at its start."""
        columns = self.columns
        if isinstance(columns, MessagesColumn):
            messages = [_message(one, self.mark, columns.template) for one in row.get(columns.field) or []]
            if count and not any(self.mark in str(one.get("content")) or _has_image(one) for one in messages):
                first = next((n for n, one in enumerate(messages) if one.get("role") == "user"), 0)
                messages[first:first] = _with_first(messages[first : first + 1], self.mark * count, columns)
                del messages[first + 1 : first + 2]
            return row | {columns.field: messages}
        first = columns.prompt if isinstance(columns, PromptColumns) else columns.names[0]
        texts = [row.get(name) for name in columns.names]
        if count and isinstance(row.get(first), str) and not any(self.mark in str(text) for text in texts):
            return row | {first: self.mark * count + row[first]}
        return row


def _listed(value: Any) -> list[Any]:
    values = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    if isinstance(value, InFile):
        values = [value]
    return [one for one in values if one is not None]


def _image(value: Any, folder: Path) -> Image:
    if isinstance(value, Mapping):
        raw, path = value.get("bytes"), value.get("path")
        value = raw if raw is not None else path
    if isinstance(value, bytes | InFile):
        return value
    if not isinstance(value, str) or not value:
        raise DataError(
            f"an image is {type(value).__name__}; expected the name of a file, bytes, or what `datasets` "
            "writes of an image"
        )
    if not (path := folder / value).is_file():
        raise DataError(f"there is no image {path}; set `root` to the folder that names are relative to")
    return InFile(path)


def _message(message: Any, mark: str, template: str) -> dict[str, Any]:
    """Return a message with `role` and `content`, its parts as one text unless the template reads them."""
    if not isinstance(message, Mapping):
        raise DataError(f"a message is {type(message).__name__}; expected an object")
    found = dict(message)
    if "from" in found and "role" not in found:
        speaker = found.pop("from")
        found |= {"role": SPEAKERS.get(speaker, speaker), "content": found.pop("value", None)}
    parts = found.get("content")
    if not isinstance(parts, list) or template == "tokenizer":
        return found
    return found | {"content": "".join(_part(part, mark) for part in parts)}


def _part(part: Any, mark: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image":
        return mark
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise DataError(
        f'given {part!r} as part of a message; expected {{"type": "image"}} or "text" with its text'
    )


def _has_image(message: Mapping[str, Any]) -> bool:
    parts = message.get("content")
    return isinstance(parts, list) and any(
        isinstance(part, Mapping) and part.get("type") == "image" for part in parts
    )


def _with_first(
    messages: Sequence[dict[str, Any]], marks: str, columns: MessagesColumn
) -> list[dict[str, Any]]:
    """Prepend image marks to the first message."""
    return [
        one | {"content": [{"type": "text", "text": marks}, *one["content"]]}
        if isinstance(one.get("content"), list)
        else one | {"content": marks + (one.get("content") or "")}
        for one in messages
    ]


def _interleaved(row: Mapping[str, Any], field: str) -> str:
    texts = row.get(field)
    if not isinstance(texts, Sequence) or isinstance(texts, str):
        raise DataError(f"{field!r} holds {type(texts).__name__}; expected a list of texts and nulls")
    if wrong := [one for one in texts if one is not None and not isinstance(one, str)]:
        raise DataError(f"{field!r} holds {type(wrong[0]).__name__} in its list; expected texts and nulls")
    return "".join(MARK if text is None else text for text in texts)


def _found(text: str, part: str) -> Iterable[int]:
    at = text.find(part)
    while at >= 0:
        yield at
        at = text.find(part, at + len(part))


def _replaced(document: Document, mark: str) -> Document:
    """Replace another mark in a document by `MARK`."""
    starts = list(_found(document.text, mark))
    grows = len(MARK) - len(mark)

    def moved(place: int) -> int:
        return place + grows * sum(start < place for start in starts)

    targets = document.targets and tuple((moved(start), moved(stop)) for start, stop in document.targets)
    inside = {place for at in starts for place in range(at, at + len(mark))}
    return document._replace(
        text=document.text.replace(mark, MARK),
        targets=targets,
        spelled=tuple(moved(place) for place in document.spelled if place not in inside),
    )
