"""From structs to TOML text, which loads to the same value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import tomli_w

from forge_config.keys import item, join
from forge_config.plain import is_table_array, plain
from forge_config.struct import Config

WIDTH = 100
"""Arrays longer than this are written one item a line."""


def to_toml(value: Config, origins: Mapping[str, str] | None = None, imports: Sequence[str] = ()) -> str:
    """TOML that loads to the same value, its defaults written out.

    Args:
        value: any struct.
        origins: where each key comes from, as `Loaded.origins`; a comment behind each value says so.
        imports: modules whose structs the value holds, as `Loaded.imports`.

    Raises:
        ConfigError: a value cannot be written in TOML.
    """
    head: dict[str, Any] = {"imports": list(imports)} if imports else {}
    return dumps(head | plain(value), origins)


def dumps(tree: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> str:
    """TOML text of plain data."""
    return "\n".join(_table(tree, "", "", origins or {})).strip("\n") + "\n"


def _table(tree: Mapping[str, Any], key: str, header: str, origins: Mapping[str, str]) -> Iterator[str]:
    """The lines of one table: first its values, then its tables. `header` is `key` without array indices."""
    for name, value in tree.items():
        if not _is_table(value):
            origin = origins.get(join(key, name))
            yield f"{join('', name)} = {_value(value)}" + (f"  # {origin}" if origin else "")
    for name, value in tree.items():
        inner, title = join(key, name), join(header, name)
        if isinstance(value, dict):
            table = cast(dict[str, Any], value)
            if not table or not all(_is_table(one) for one in table.values()):
                yield f"\n[{title}]"
            yield from _table(table, inner, title, origins)
        elif is_table_array(value):
            for index, one in enumerate(value):
                yield f"\n[[{title}]]"
                yield from _table(one, item(inner, index), title, origins)


def inline(value: Any) -> str:
    """One value as TOML, as it may stand behind a key or `--key=`; tables are in braces."""
    return _inline(cast(dict[str, Any], value)) if isinstance(value, dict) else _value(value)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or is_table_array(value)


def _value(value: Any) -> str:
    if not isinstance(value, list):
        return tomli_w.dumps({"k": value}).removeprefix("k = ").removesuffix("\n")
    items = [
        _value(one) if not isinstance(one, dict) else _inline(cast(Any, one))
        for one in cast(list[Any], value)
    ]
    line = f"[{', '.join(items)}]"
    if len(line) <= WIDTH:
        return line
    return "[\n" + "".join(f"    {one},\n" for one in items) + "]"


def _inline(table: dict[str, Any]) -> str:
    """A table inside an array that also holds other things."""
    pairs = [
        f"{join('', name)} = {_value(one) if not isinstance(one, dict) else _inline(cast(Any, one))}"
        for name, one in table.items()
    ]
    return f"{{{', '.join(pairs)}}}"
