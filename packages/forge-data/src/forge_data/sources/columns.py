"""The parts of a row that make a document, and those that are targets. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from forge_data.error import DataError
from forge_data.order.order import key
from forge_data.tokenizer.chat import ChatTemplate, Spans
from forge_data.tokenizer.tokenizer import Bytes, Tokenizer

CHATML = "<|im_start|>{role}\n{content}<|im_end|>\n"
"""A turn of a conversation as many models know it."""

OF_TOKENIZER = "tokenizer"
"""In place of a template: that of the tokenizer."""

ROLES = {"assistant": True} | dict.fromkeys(("system", "developer", "user", "tool", "function"), False)
"""Roles of a conversation, and whether what they say is a target."""

SAID_ELSEWHERE = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold part of what was said, which a template of role and content would leave out."""

MARK = "\udc82"
"""Stands in a control token that a row only spells; a half character, which no text of a row holds."""


class Document(NamedTuple):
    """A document, which is tokenized as a whole.

    Attributes:
        text: all of it.
        targets: ranges of characters that are targets; None: all of it. The end token belongs to a range that
            reaches the end.
        spelled: positions of characters inside control tokens that are only text: a user that writes
            `<|im_start|>` begins no turn.
        is_complete: the text has all special tokens that belong at its beginning and end.
    """

    text: str
    targets: Spans | None = None
    spelled: tuple[int, ...] = ()
    is_complete: bool = False


class Columns(Protocol):
    """Turns rows into documents.

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

    def document(self, row: dict[str, Any], tokenizer: Tokenizer) -> Document:
        """Return the document of a row; None for a row without text.

        Raises:
            DataError: the row lacks these columns, or has something else in them.
        """
        ...


def named(columns: Columns, tokenizer: Tokenizer) -> str:
    """Name the documents that columns make of rows for a tokenizer; the cache uses it in names of tokens.

    Documents with targets are encoded as a whole, which for bytes is the same as part by part.
    """
    name = str(columns)
    if columns.masks and not isinstance(tokenizer, Bytes):
        name += " whole"
    if isinstance(columns, MessagesColumn) and columns.template == OF_TOKENIZER:
        name += f" {key(_template_of(tokenizer)):016x}"
    return name


@dataclass(frozen=True)
class TextColumn:
    """One column with the whole text.

    Attributes:
        field: its name.
        control_tokens: whether control tokens that the text spells are control tokens.
        as_text: endings of files that are one document each, although they usually hold rows.
    """

    field: str = "text"
    control_tokens: bool = True
    as_text: tuple[str, ...] = ()
    masks = False

    def __str__(self) -> str:
        return self.field + _spelled(self.control_tokens, True)

    @property
    def names(self) -> list[str]:
        """See `Columns`."""
        return [self.field]

    def document(self, row: dict[str, Any], tokenizer: Tokenizer) -> Document:
        """See `Columns.document`."""
        return _document(marker(tokenizer, self.control_tokens)(_text(row, self.field)), None)


@dataclass(frozen=True)
class PromptColumns:
    """A prompt, which is no target, and its completion, which is the target.

    Attributes:
        prompt: the name of the column with the prompt.
        completion: the name of the column with the completion.
        control_tokens: whether control tokens that the texts spell are control tokens.
    """

    prompt: str = "prompt"
    completion: str = "completion"
    control_tokens: bool = dataclasses.field(default=True, repr=False)
    masks = True

    def __str__(self) -> str:
        return repr(self) + _spelled(self.control_tokens, True)

    @property
    def names(self) -> list[str]:
        """See `Columns`."""
        return [self.prompt, self.completion]

    def document(self, row: dict[str, Any], tokenizer: Tokenizer) -> Document:
        """See `Columns.document`."""
        prompt, completion = _text(row, self.prompt), _text(row, self.completion)
        if row[self.completion] is None and prompt:
            raise DataError(f"{self.completion!r} is null; expected the text that follows the prompt")
        marked = marker(tokenizer, self.control_tokens)
        before, text = marked(prompt), marked(prompt) + marked(completion)
        return _document(text, ((len(before), len(text)),))


@dataclass(frozen=True)
class MessagesColumn:
    """A conversation; the assistant's messages are the targets.

    Attributes:
        field: the name of the column: a list of messages with `role` and `content`.
        template: template of a turn. Text before `{content}` is no target; `{content}` and the text after it
            is a target in turns of the assistant. `tokenizer` uses the chat template of the tokenizer
            instead.
        control_tokens: whether control tokens that messages spell are control tokens.
        roles: further roles, and whether their messages are targets.
        tools: the name of the column with the tools that the chat template of the tokenizer lists.
    """

    field: str = "messages"
    template: str = CHATML
    control_tokens: bool = dataclasses.field(default=False, repr=False)
    roles: tuple[tuple[str, bool], ...] = dataclasses.field(default=(), repr=False)
    tools: str | None = dataclasses.field(default=None, repr=False)
    masks = True

    def __str__(self) -> str:
        more = f" {self.roles}" if self.roles else ""
        more += f" tools {self.tools}" if self.tools else ""
        return repr(self) + _spelled(self.control_tokens, False) + more

    @property
    def names(self) -> list[str]:
        """See `Columns`."""
        return [self.field] + ([self.tools] if self.tools else [])

    def document(self, row: dict[str, Any], tokenizer: Tokenizer) -> Document:
        """See `Columns.document`."""
        marked = marker(tokenizer, self.control_tokens)
        messages = self._messages(row)
        speaks = [self._speaks(message) for message in messages]
        if self.template == OF_TOKENIZER:
            given = [_mapped(marked, message) for message in messages]
            tools = _tools(row[self.tools]) if self.tools in row else None
            text, targets = _template_of(tokenizer).render(given, speaks, _mapped(marked, tools))
        else:
            text, targets = self._stated(messages, speaks, marked)
        return _document(text, targets)._replace(is_complete=self.template == OF_TOKENIZER)

    def _stated(
        self, messages: list[dict[str, Any]], speaks: list[bool], marked: Callable[[str], str]
    ) -> tuple[str, Spans]:
        """Return text and targets by a template of a turn."""
        before, _, after = self.template.partition("{content}")
        text, targets = "", list[tuple[int, int]]()
        for message, is_target in zip(messages, speaks, strict=True):
            text += before.replace("{role}", message["role"])
            start = len(text)
            text += marked(_content(message)) + after.replace("{role}", message["role"])
            if is_target:
                targets.append((start, len(text)))
        return text, tuple(targets)

    def _messages(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        if self.field not in row:
            raise DataError(f"no row with messages under {self.field!r}; it has {', '.join(row)}")
        messages = row[self.field]
        if not isinstance(messages, list | tuple):
            raise DataError(f"{self.field!r} holds {type(messages).__name__}, not a list of messages")
        for message in messages:  # pyright: ignore[reportUnknownVariableType]
            if not isinstance(message, dict):
                raise DataError(f"{self.field!r} holds {type(message).__name__} for a message")
        # Tables have every key in every message, and null where it has none.
        return [
            {name: _whole(value) for name, value in message.items() if value is not None or name == "content"}
            for message in messages  # pyright: ignore[reportUnknownVariableType]
        ]

    def _speaks(self, message: dict[str, Any]) -> bool:
        """Whether the text of a message is a target."""
        role, roles = _text(message, "role"), ROLES | dict(self.roles)
        if role not in roles:
            raise DataError(
                f"given the role {role!r}; expected one of {', '.join(roles)}: say with "
                f"`roles = {{ {role} = true }}` that what it says is a target, or with false that it is none"
            )
        return roles[role]


def _content(message: dict[str, Any]) -> str:
    """Return the text of a message, if a template of role and content can express all of the message.

    Raises:
        DataError: it cannot.
    """
    more = [
        name
        for name, value in message.items()
        if value and name != "content" and (name in SAID_ELSEWHERE or isinstance(value, list | dict))
    ]
    if more or not isinstance(message.get("content", ""), str):
        what = more[0] if more else f"content of type {type(message['content']).__name__}"
        raise DataError(
            f"a message of the role {message['role']!r} has {what}, which this template would leave out; use "
            "template = 'tokenizer', whose chat template may write it, or remove such rows"
        )
    return _text(message, "content")


def _tools(value: Any) -> Any:
    """Return a list of tools, which tables often hold as JSON text."""
    try:
        return _whole(json.loads(value) if isinstance(value, str) else value)
    except ValueError as error:
        raise DataError(f"the tools are no JSON: {error}") from None


def _template_of(tokenizer: Tokenizer) -> ChatTemplate:
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        raise DataError(
            "given template = 'tokenizer', and the tokenizer has no chat template (chat_template.jinja, or "
            "chat_template in tokenizer_config.json, beside its tokenizer.json); state a template"
        )
    return template


def _spelled(control_tokens: bool, default: bool) -> str:
    """Return the part of a name for `control_tokens`; nothing for the default."""
    return "" if control_tokens == default else f" control_tokens={control_tokens}"


def marker(tokenizer: Tokenizer, control_tokens: bool) -> Callable[[str], str]:
    """Return a function that puts a `MARK` into each control token of a text, unless it is to be one."""
    tokens: tuple[str, ...] = () if control_tokens else getattr(tokenizer, "control_tokens", ())
    if not tokens:
        return lambda text: text
    pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
    # before the last character, so that not even a part of the token and what follows it is one
    return lambda text: pattern.sub(lambda found: f"{found[0][:-1]}{MARK}{found[0][-1]}", text)


def _document(marked: str, targets: Spans | None) -> Document:
    """Make a document of a text with marks, and of ranges of targets in it."""
    first, *others = marked.split(MARK)
    text, spelled = first, list[int]()
    for piece in others:
        spelled.append(len(text))
        text += piece
    if spelled and targets is not None:
        places = [mark + number for number, mark in enumerate(spelled)]
        moved = [at - sum(place < at for place in places) for span in targets for at in span]
        targets = tuple(zip(moved[::2], moved[1::2], strict=True))
    return Document(text, targets, tuple(spelled))


def _mapped(change: Callable[[str], str], value: Any) -> Any:
    """Return the same value with changed texts, except names of keys and the role."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: one if name == "role" else _mapped(change, one) for name, one in value.items()}
    return [_mapped(change, one) for one in value] if isinstance(value, list) else value


def _whole(value: Any) -> Any:
    """Return the same value with whole characters."""
    return _mapped(_characters, value)


def _text(row: dict[str, Any], field: str) -> str:
    if field not in row:
        raise DataError(f"no row with a text under {field!r}; it has {', '.join(row) or 'nothing'}")
    text = row[field]
    if not isinstance(text, str | None):
        raise DataError(f"{field!r} holds {type(text).__name__}, not text")
    return _characters(text or "")


def _characters(text: str) -> str:
    """Replace halves of characters (U+D800 to U+DFFF), which escapes may name and no encoding has."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
