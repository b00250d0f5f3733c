"""Which parts of a row make a document, and which of them are targets. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from forge_data.error import DataError

CHATML = "<|im_start|>{role}\n{content}<|im_end|>\n"
"""A turn of a conversation as many models know it."""


class Part(NamedTuple):
    """Part of a document, tokenized by itself.

    Attributes:
        text: of it.
        is_target: whether its tokens are targets.
    """

    text: str
    is_target: bool = True


class Columns(Protocol):
    """Makes documents of rows. What it is turned into by `str` names the tokens in the cache.

    Attributes:
        names: the columns that are read.
        masks: whether some parts may be no targets.
    """

    @property
    def names(self) -> list[str]:
        """See above."""
        ...

    @property
    def masks(self) -> bool:
        """See above."""
        ...

    def parts(self, row: dict[str, Any]) -> list[Part]:
        """The document of a row; no parts, or none with text, make no document.

        Raises:
            DataError: the row has not these columns, or something else in them.
        """
        ...


@dataclass(frozen=True)
class TextColumn:
    """One column with the whole text.

    Attributes:
        field: its name.
    """

    field: str = "text"
    masks = False

    def __str__(self) -> str:
        return self.field

    @property
    def names(self) -> list[str]:
        """See `Columns`."""
        return [self.field]

    def parts(self, row: dict[str, Any]) -> list[Part]:
        """See `Columns.parts`."""
        return [Part(_text(row, self.field))]


@dataclass(frozen=True)
class PromptColumns:
    """A prompt, which is no target, and its completion, which is.

    Attributes:
        prompt: the name of its column.
        completion: the name of its column.
    """

    prompt: str = "prompt"
    completion: str = "completion"
    masks = True

    @property
    def names(self) -> list[str]:
        """See `Columns`."""
        return [self.prompt, self.completion]

    def parts(self, row: dict[str, Any]) -> list[Part]:
        """See `Columns.parts`."""
        return [Part(_text(row, self.prompt), False), Part(_text(row, self.completion))]


@dataclass(frozen=True)
class MessagesColumn:
    """A conversation, of which what the assistant says is the target.

    Attributes:
        field: the name of the column: a list of messages with `role` and `content`.
        template: of a turn. What comes before `{content}` is no target; `{content}` and what follows it is
            one in turns of the assistant.
    """

    field: str = "messages"
    template: str = CHATML
    masks = True

    @property
    def names(self) -> list[str]:
        """See `Columns`."""
        return [self.field]

    def parts(self, row: dict[str, Any]) -> list[Part]:
        """See `Columns.parts`."""
        before, _, after = self.template.partition("{content}")
        messages = row.get(self.field)
        if not isinstance(messages, list | tuple):
            raise DataError(f"{self.field!r} holds {type(messages).__name__}, not a list of messages")
        found: list[Part] = []
        for message in messages:  # pyright: ignore[reportUnknownVariableType]
            if not isinstance(message, dict):
                raise DataError(f"{self.field!r} holds {type(message).__name__} for a message")
            role, content = _text(message, "role"), _text(message, "content")  # pyright: ignore[reportUnknownArgumentType]
            found.append(Part(before.replace("{role}", role), False))
            found.append(Part(content + after.replace("{role}", role), role == "assistant"))
        return found


def _text(row: dict[str, Any], field: str) -> str:
    if field not in row:
        raise DataError(f"no row with a text under {field!r}; it has {', '.join(row) or 'nothing'}")
    text = row[field]
    if not isinstance(text, str | None):
        raise DataError(f"{field!r} holds {type(text).__name__}, not text")
    # Escapes such as "\\ud800" are half characters, which no encoding has.
    if text is None or text.isascii():
        return text or ""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
