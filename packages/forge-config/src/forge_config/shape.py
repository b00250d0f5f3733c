"""What a field may hold: the annotations of structs as `msgspec.inspect` types, and words for them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as shapes

from forge_config.registry import Registry, registry_of
from forge_config.struct import Config

Shape = shapes.Type
NUMBERS = (shapes.IntType, shapes.FloatType)
ARRAYS = (shapes.ListType, shapes.VarTupleType, shapes.TupleType)


@cache
def fields_of(struct: type[Config]) -> dict[str, shapes.Field]:
    """The fields of a struct by their name in TOML."""
    info = shapes.type_info(struct)
    assert isinstance(info, shapes.StructType)
    return {field.encode_name: field for field in info.fields}


def default_of(field: shapes.Field) -> Any:
    """The default of a field that has one."""
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def members(shape: Shape) -> list[Shape]:
    """The alternatives of a field, None left out: one for a plain annotation, several for a union."""
    while isinstance(shape, shapes.Metadata):
        shape = shape.type
    if isinstance(shape, shapes.UnionType):
        return [inner for one in shape.types for inner in members(one)]
    return [] if isinstance(shape, shapes.NoneType) else [shape]


def optional(shape: Shape) -> bool:
    """Whether the field may hold None."""
    while isinstance(shape, shapes.Metadata):
        shape = shape.type
    if isinstance(shape, shapes.UnionType):
        return any(optional(one) for one in shape.types)
    return isinstance(shape, shapes.NoneType)


def struct_in(shape: Shape) -> type[Config] | None:
    """The struct or interface that stands in a field as one table."""
    return next((struct_of(one) for one in members(shape) if isinstance(one, shapes.StructType)), None)


def struct_of(shape: shapes.StructType) -> type[Config]:
    """The struct or interface of a shape; configurations hold no structs but sections."""
    assert issubclass(shape.cls, Config), shape.cls
    return shape.cls


def accepts_text(shape: Shape) -> bool:
    """Whether any string can stand in a field."""
    return any(isinstance(one, (shapes.StrType, shapes.AnyType)) or is_path(one) for one in members(shape))


def is_path(shape: Shape) -> bool:
    """Whether the shape is a file name."""
    return isinstance(shape, shapes.CustomType) and issubclass(shape.cls, Path)


def entry(shape: Shape, given: Any, name: str) -> Shape | None:
    """The shape of one entry of a given table; None when it has no such entry or takes anything."""
    for one in members(shape):
        if isinstance(one, shapes.DictType):
            return one.value_type
        if isinstance(one, shapes.StructType):
            struct = chosen(struct_of(one), given)
            field = fields_of(struct).get(name) if struct is not None else None
            return field.type if field is not None else None
    return None


def chosen(struct: type[Config], given: Any) -> type[Config] | None:
    """The struct that a table is decoded with: `struct` itself, or by `type` when it is an interface."""
    registry = registry_of(struct)
    if registry is None:
        return struct
    name = chosen_type(registry, given)
    return registry[name] if isinstance(name, str) and name in registry else None


def chosen_type(registry: Registry[Any], given: Any) -> Any:
    """The value of `type` in a table of an open section, or the default of the registry."""
    return given.get("type", registry.default) if isinstance(given, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def words(shape: Shape) -> str:
    """What a field takes, as a reader of TOML would say it, bounds included."""
    return " or ".join(dict.fromkeys(_one(one) for one in members(shape))) or "nothing"


def _one(shape: Shape) -> str:
    if isinstance(shape, NUMBERS):
        name = "integer" if isinstance(shape, shapes.IntType) else "number"
        return " ".join([name, ", ".join(bounds(shape))]).strip()
    if isinstance(shape, shapes.StrType):
        return " ".join(["string", ", ".join([*_lengths(shape), *_pattern(shape)])]).strip()
    if isinstance(shape, shapes.LiteralType):
        return " or ".join(shown(value) for value in shape.values)
    if isinstance(shape, shapes.TupleType):
        return f"array of {len(shape.item_types)} ({', '.join(words(one) for one in shape.item_types)})"
    if isinstance(shape, (shapes.ListType, shapes.VarTupleType)):
        return f"array of {words(shape.item_type)}{''.join(f' ({one})' for one in _lengths(shape))}"
    if isinstance(shape, shapes.DictType):
        return f"table of {words(shape.value_type)}"
    if isinstance(shape, shapes.StructType):
        return "table"
    if isinstance(shape, shapes.BoolType):
        return "true or false"
    return "path" if is_path(shape) else "anything"


def bounds(shape: shapes.IntType | shapes.FloatType) -> list[str]:
    """The bounds of a number, in words."""
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "multiple_of": "a multiple of"}
    return [f"{sign} {bound}" for name, sign in signs.items() if (bound := getattr(shape, name)) is not None]


def _lengths(shape: shapes.StrType | shapes.ListType | shapes.VarTupleType) -> list[str]:
    low, high = shape.min_length, shape.max_length
    return [f"of length {sign} {n}" for sign, n in ((">=", low), ("<=", high)) if n is not None]


def _pattern(shape: shapes.StrType) -> list[str]:
    return [] if shape.pattern is None else [f"like `{shape.pattern}`"]


def shown(value: Any) -> str:
    """A value as it would be written in TOML, cut when it is long."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    else:
        text = '"' + value + '"' if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
