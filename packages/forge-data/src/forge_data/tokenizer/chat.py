"""How the chat template of a tokenizer formats a conversation, and which parts are the assistant's.

Templates are rendered as `transformers` renders them (`utils/chat_template_utils.py`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_data.error import DataError

Spans = tuple[tuple[int, int], ...]
"""Places in a text, each from its first character to the one behind its last."""

START, STOP = "\udc80", "\udc81"
"""Stand around what a template marks; half characters, which no text of a row holds."""

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ChatTemplate:
    """A template in Jinja.

    Attributes:
        source: its text.
        special_tokens: name and text of the tokens it may insert, such as `bos_token`.
    """

    source: str
    special_tokens: tuple[tuple[str, str], ...] = ()

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        speaks: Sequence[bool],
        tools: Any = None,
    ) -> tuple[str, Spans]:
        """Return the text of a conversation, and the ranges of its targets.

        The template marks targets with `{% generation %}`. A template without this mark is rendered up to
        each turn that is a target: the text of the turn after the generation prompt is the target.

        Args:
            messages: the turns.
            speaks: whether each of them is a target.
            tools: the tools for the template.

        Raises:
            DataError: the template refuses the conversation, or formats earlier turns differently when others
                follow, so that the characters of a turn are unknown.
        """
        text = self._rendered(messages, tools)
        if "endgeneration" in self.source:
            return _unmarked(text)
        spans: list[tuple[int, int]] = []
        for number in (n for n, one in enumerate(speaks) if one):
            before = self._rendered(messages[:number], tools, add_generation_prompt=True)
            after = self._rendered(messages[: number + 1], tools)
            if not (text.startswith(after) and after.startswith(before)):
                raise DataError(
                    f"the chat template of the tokenizer writes turn {number} otherwise when others follow, "
                    "so that its targets are not known; mark them in the template with {% generation %}, or "
                    "state a `template`"
                )
            spans.append((len(before), len(after)))
        return text, tuple(spans)

    def _rendered(
        self, messages: Sequence[dict[str, Any]], tools: Any, add_generation_prompt: bool = False
    ) -> str:
        jinja2 = _jinja()
        given = {"messages": list(messages), "tools": tools, "documents": None} | dict(self.special_tokens)
        try:
            return _compiled(self.source).render(add_generation_prompt=add_generation_prompt, **given)
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DataError(f"the chat template refuses turns of {roles}: {error}") from None


def in_jinja(template: str, bos: str = "") -> str:
    """Convert the template of a turn into a chat template.

    Args:
        template: with `{role}` and `{content}`.
        bos: begins a conversation.
    """

    def turn(part: str, role: str) -> str:
        return f" ~ {role} ~ ".join(map(json.dumps, part.split("{role}")))

    before, _, after = template.partition("{content}")
    first = f"{{{{ {json.dumps(bos)} }}}}" if bos else ""
    turn_text = f"{turn(before, 'message.role')} ~ message.content ~ {turn(after, 'message.role')}"
    return (
        f"{first}{{% for message in messages %}}{{{{ {turn_text} }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {turn(before, json.dumps('assistant'))} }}}}{{% endif %}}"
    )


def _unmarked(text: str) -> tuple[str, Spans]:
    """Return the text without the marks, and the ranges between them."""
    first, *others = text.split(START)
    plain, spans = first, list[tuple[int, int]]()
    for piece in others:
        reply, _, rest = piece.partition(STOP)
        spans.append((len(plain), len(plain) + len(reply)))
        plain += reply + rest
    return plain, tuple(spans)


def _jinja() -> Any:
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise DataError(
            "the chat template of a tokenizer needs: pip install 'forge-data[tokenizers]' (it brings jinja2)"
        ) from None
    return jinja2


@functools.lru_cache(8)
def _compiled(source: str) -> Any:
    jinja2 = _jinja()

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{START}{caller()}{STOP}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **settings: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **settings)

    def no_time(_: str) -> str:
        raise jinja2.TemplateError("it asks what time it is (strftime_now): text would differ each day")

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": refuse, "strftime_now": no_time}
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"the chat template of the tokenizer is no Jinja template: {error}") from None


def special_tokens_beside(folder: Path) -> dict[str, str]:
    """Return the named special tokens in the files beside a `tokenizer.json`.

    Raises:
        DataError: such a file is no JSON object.
    """
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        found |= read_json(folder / name)
    texts = {name: found.get(name) for name in SPECIAL_TOKENS}
    texts = {name: one.get("content") if isinstance(one, dict) else one for name, one in texts.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def chat_template_beside(folder: Path) -> ChatTemplate | None:
    """The chat template beside a `tokenizer.json`; None where there is none.

    Raises:
        DataError: there are several, none of which is the default one.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        source: Any = file.read_text(encoding="utf-8")
    else:
        source = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(source, list):
        named = {one["name"]: one["template"] for one in source}
        if "default" not in named:
            raise DataError(f"{folder} has the chat templates {', '.join(named)}; expected one named default")
        source = named["default"]
    if source is None:
        return None
    return ChatTemplate(source, tuple(special_tokens_beside(folder).items()))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file.

    Raises:
        DataError: it holds something else.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} holds {type(found).__name__}; expected an object")
    return found
