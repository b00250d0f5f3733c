"""File names of a configuration, made to mean the same wherever it is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from forge_config.struct import Config

T = TypeVar("T", bound=Config)


def absolute(value: T, folder: Path) -> T:
    """The same configuration, the file names in the `path_keys` of its structs being absolute.

    Args:
        value: any struct; sections, arrays and tables of sections are followed.
        folder: what relative names are relative to. Empty names stay empty.
    """
    keys = {name for base in type(value).__mro__ for name in base.__dict__.get("path_keys", ())}
    changes: dict[str, Any] = {}
    for name in type(value).__struct_fields__:
        before = getattr(value, name)
        changed = _named(before, folder) if name in keys else _followed(before, folder)
        if changed != before:
            changes[name] = changed
    return msgspec.structs.replace(value, **changes) if changes else value


def _named(value: Any, folder: Path) -> Any:
    if isinstance(value, list | tuple):
        names = cast(list[Any], value)
        return type(names)(_named(one, folder) for one in names)
    if isinstance(value, dict):
        table = cast(dict[Any, Any], value)
        return {name: _named(one, folder) for name, one in table.items()}
    if isinstance(value, str | Path) and value != "":
        return type(value)(folder / value)
    return value


def _followed(value: Any, folder: Path) -> Any:
    if isinstance(value, Config):
        return absolute(value, folder)
    if isinstance(value, list | tuple):
        items = cast(list[Any], value)
        return type(items)(_followed(one, folder) for one in items)
    if isinstance(value, dict):
        table = cast(dict[Any, Any], value)
        return {name: _followed(one, folder) for name, one in table.items()}
    return value
