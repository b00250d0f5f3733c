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
        held = getattr(value, name)
        changed = _named(held, folder) if name in keys else _followed(held, folder)
        if changed != held:
            changes[name] = changed
    return msgspec.structs.replace(value, **changes) if changes else value


def _named(held: Any, folder: Path) -> Any:
    if isinstance(held, list | tuple):
        names = cast(list[Any], held)
        return type(names)(_named(one, folder) for one in names)
    if isinstance(held, dict):
        table = cast(dict[Any, Any], held)
        return {name: _named(one, folder) for name, one in table.items()}
    if isinstance(held, str | Path) and held != "":
        return type(held)(folder / held)
    return held


def _followed(held: Any, folder: Path) -> Any:
    if isinstance(held, Config):
        return absolute(held, folder)
    if isinstance(held, list | tuple):
        items = cast(list[Any], held)
        return type(items)(_followed(one, folder) for one in items)
    if isinstance(held, dict):
        table = cast(dict[Any, Any], held)
        return {name: _followed(one, folder) for name, one in table.items()}
    return held
