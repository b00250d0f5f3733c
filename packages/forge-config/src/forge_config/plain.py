"""From structs back to plain data, and a digest of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, cast

from msgspec import inspect as shapes

from forge_config.decode import NONE
from forge_config.keys import item, join
from forge_config.registry import type_name
from forge_config.shape import Shape, accepts_text, default_of, fields_of, members
from forge_config.struct import Config, ConfigError

_ANYTHING = shapes.AnyType()


def plain(value: Any, shape: Shape = _ANYTHING) -> Any:
    """Dicts, lists and scalars, every default filled in; open sections carry their `type`.

    None is left out where it is the default, and otherwise written as the string "none".

    Raises:
        ConfigError: a value cannot be written in TOML.
    """
    if isinstance(value, Config):
        return _section(value)
    if isinstance(value, dict):
        inner = next(
            (one.value_type for one in members(shape) if isinstance(one, shapes.DictType)), _ANYTHING
        )
        return {str(name): plain(one, inner) for name, one in cast(dict[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return _array(list(cast(list[Any], value)), shape)
    if value is None:
        raise ConfigError("None inside an array or a free table cannot be written in TOML")
    if isinstance(value, int) and not isinstance(value, bool) and _only_float(shape):
        return float(value)
    return value.as_posix() if isinstance(value, Path) else value


def _section(value: Config) -> dict[str, Any]:
    name = type_name(type(value))
    tree: dict[str, Any] = {"type": name} if name is not None else {}
    for key, field in fields_of(type(value)).items():
        inner = getattr(value, field.name)
        if inner is not None:
            tree[key] = plain(inner, field.type)
        elif field.required or default_of(field) is not None:
            if accepts_text(field.type):
                struct = type(value).__name__
                raise ConfigError(f"{struct}.{key} is None, which TOML cannot say; make None its default")
            tree[key] = NONE
    return tree


def _array(value: list[Any], shape: Shape) -> list[Any]:
    for one in members(shape):
        if isinstance(one, shapes.TupleType) and len(one.item_types) == len(value):
            return [plain(inner, kind) for inner, kind in zip(value, one.item_types, strict=True)]
        if isinstance(one, (shapes.ListType, shapes.VarTupleType)):
            return [plain(inner, one.item_type) for inner in value]
    return [plain(inner) for inner in value]


def _only_float(shape: Shape) -> bool:
    """Whether a whole number in this place means a float."""
    kinds = {type(one) for one in members(shape)}
    return shapes.FloatType in kinds and not kinds & {shapes.IntType, shapes.AnyType}


def canonical(value: Any) -> str:
    """One text for equal plain data, whatever the order of keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def digest(value: Config) -> str:
    """32 hex digits that name the value, however it was written and in whatever order."""
    return hashlib.blake2b(canonical(plain(value)).encode(), digest_size=16).hexdigest()


def flat(tree: Any, key: str = "") -> dict[str, Any]:
    """Leaves by dotted key; items of an array of tables are `name[0].key`."""
    if isinstance(tree, dict) and (tree or not key):
        table = cast(dict[str, Any], tree)
        return {k: v for name, one in table.items() for k, v in flat(one, join(key, name)).items()}
    if is_table_array(tree):
        tables = cast(list[Any], tree)
        return {k: v for i, one in enumerate(tables) for k, v in flat(one, item(key, i)).items()}
    return {key: tree}


def is_table_array(value: Any) -> bool:
    """Whether a plain value is an array of tables, and not an empty one."""
    items = cast(list[Any], value) if isinstance(value, list) else []
    return bool(items) and all(isinstance(one, dict) for one in items)
