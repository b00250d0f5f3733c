"""Overrides from the command line: `--section.key=value`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import tomli

from forge_config.keys import join
from forge_config.problem import Problems
from forge_config.source import MAX_DEPTH, Layer, Tree, is_too_deep, places

EXPECTED = "expected --section.key=value"


def parse(flags: Sequence[str], problems: Problems) -> tuple[Layer, dict[str, str]]:
    """One layer of all flags, a later one winning, and the literal text of each value by key.

    A value is TOML. What is no TOML is taken as a string, so that names and file names need no quotes; if it
    begins like an array, a table or a quoted string it is a mistake.
    """
    layer = Layer()
    raw: dict[str, str] = {}
    for flag in flags:
        name, equals, text = flag.removeprefix("--").partition("=")
        if not flag.startswith("--"):
            problems.add("", f"given {flag!r}; {EXPECTED}: two dashes are missing", place="command line")
        elif not equals:
            problems.add("", f"given {flag!r}; {EXPECTED}: '=' is missing", place="command line")
        elif (names := _names(name)) is None:
            problems.add("", f"given {flag!r}; {EXPECTED}: {name!r} is no key", place="command line")
        else:
            try:
                value = value_of(text)
            except ValueError as error:
                problems.add(_dotted(names), f"given {text!r}; not valid TOML: {error}", place=flag)
                continue
            if len(names) > MAX_DEPTH or is_too_deep(value):
                problems.add("", f"nested more than {MAX_DEPTH} deep; flatten it", place=f"{flag[:60]}...")
                continue
            if not _set(layer.tree, names, value):
                problems.add(_dotted(names), "an earlier flag gave a value to a part of this key", place=flag)
                continue
            raw[_dotted(names)] = text
            layer.origins |= places(value, _dotted(names), flag)
    return layer, raw


def value_of(text: str) -> Any:
    """The value of a TOML expression; any other text stands for itself.

    Raises:
        ValueError: the text begins as an array, a table or a quoted string and does not end as one.
    """
    try:
        found = tomli.loads(f"value = [{text}]")
    except tomli.TOMLDecodeError as error:
        if text.lstrip()[:1] in ("[", "{", '"', "'") and text:
            raise ValueError(error.msg) from None
        return text
    except RecursionError as error:
        raise ValueError(str(error)) from None
    values = found.get("value", [])
    return values[0] if len(found) == 1 and len(values) == 1 and not text.rstrip().endswith(",") else text


def _names(key: str) -> list[str] | None:
    """The parts of a dotted key, quoted as in TOML where needed."""
    try:
        found: Any = tomli.loads(f"{key} = 0")
    except tomli.TOMLDecodeError:
        return None
    names: list[str] = []
    while isinstance(found, dict):
        table = cast(Tree, found)
        if len(table) != 1:
            return None
        names.append(next(iter(table)))
        found = table[names[-1]]
    return names


def _dotted(names: Sequence[str]) -> str:
    key = ""
    for name in names:
        key = join(key, name)
    return key


def _set(tree: Tree, names: Sequence[str], value: Any) -> bool:
    """Put a value at its place; False when a part of the way is no table."""
    *tables, last = names
    for table in tables:
        inner: Any = tree.setdefault(table, {})
        if not isinstance(inner, dict):
            return False
        tree = cast(Tree, inner)
    tree[last] = value
    return True
