"""From a tree of plain values to structs, noting every mistake instead of stopping at the first."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from forge_config.problem import Problems, unknown
from forge_config.registry import registry_of
from forge_config.struct import Config

FAILED: Any = object()
"""Stands for a value that could not be decoded; its problem is noted."""


def fields_of(struct: type[Config]) -> dict[str, msgspec.structs.FieldInfo]:
    """The fields of a struct by their name in TOML."""
    return {field.encode_name: field for field in msgspec.structs.fields(struct)}


def default_of(field: msgspec.structs.FieldInfo) -> Any:
    """The default of a field that has one."""
    if field.default is not msgspec.NODEFAULT:
        return field.default
    return field.default_factory()


def struct_in(annotation: Any) -> type[Config] | None:
    """The struct that a field holds, looking through Annotated and Optional."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return next((found for part in get_args(annotation) if (found := struct_in(part))), None)
    return None


class Decoder:
    """Decodes trees; `raw` holds the literal text of command-line values by key."""

    def __init__(self, problems: Problems, origins: dict[str, str], raw: Mapping[str, str]) -> None:
        self._problems = problems
        self._origins = origins
        self._raw = raw

    def value(self, given: Any, annotation: Any, key: str) -> Any:
        """One value of any type, or FAILED."""
        if struct := struct_in(annotation):
            return self.section(given, struct, key)
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin in (list, tuple) and arguments and struct_in(arguments[0]) and isinstance(given, list):
            items = [self.value(item, arguments[0], f"{key}[{i}]") for i, item in enumerate(given)]
            return FAILED if FAILED in items else origin(items)
        if origin is dict and struct_in(arguments[1]) and isinstance(given, dict):
            entries = {name: self.value(item, arguments[1], f"{key}.{name}") for name, item in given.items()}
            return FAILED if FAILED in entries.values() else entries
        return self._leaf(given, annotation, key)

    def _leaf(self, given: Any, annotation: Any, key: str) -> Any:
        try:
            return msgspec.convert(given, annotation)
        except msgspec.ValidationError as error:
            if key in self._raw:
                try:
                    return msgspec.convert(self._raw[key], annotation)
                except msgspec.ValidationError:
                    pass
            choices = get_args(annotation) if get_origin(annotation) is Literal else ()
            expected = f"expected one of {', '.join(map(repr, choices))}" if choices else _sentence(error)
            self._problems.add(key, f"given {given!r}; {expected}")
            return FAILED

    def section(self, given: Any, struct: type[Config], key: str) -> Any:
        """One section, closed or open, or FAILED."""
        if not isinstance(given, dict):
            self._problems.add(key, f"given {given!r}; expected a table")
            return FAILED
        registry = registry_of(struct)
        if registry is not None:
            given = dict(given)
            chosen = given.pop("type", registry.default)
            if chosen is None:
                self._problems.add(key, f"no type given; expected one of {', '.join(sorted(registry))}")
                return FAILED
            if chosen not in registry:
                self._problems.add(f"{key}.type", unknown(f"{registry.section} type", str(chosen), registry))
                return FAILED
            struct = registry[chosen]
        values = self.fields(given, struct, key)
        if FAILED in values.values():
            return FAILED
        try:
            return struct(**values)
        except ValueError as error:
            self._problems.add(key, str(error))
            return FAILED

    def fields(self, given: dict[str, Any], struct: type[Config], key: str) -> dict[str, Any]:
        """Every field of a struct by name; FAILED where it could not be decoded."""
        prefix = f"{key}." if key else ""
        given, fields = self._expanded(given, struct, key), fields_of(struct)
        values: dict[str, Any] = {}
        for name in given:
            if name not in fields:
                self._problems.add(prefix + name, unknown("key", name, fields))
                values[name] = FAILED
        for name, field in fields.items():
            if name in given:
                values[field.name] = self.value(given[name], field.type, prefix + name)
            elif not field.required:
                values[field.name] = default_of(field)
            elif isinstance(field.type, type) and issubclass(field.type, Config):
                values[field.name] = self.section({}, field.type, prefix + name)
            else:
                self._problems.add(prefix + name, "missing; it has no default")
                values[field.name] = FAILED
        return values

    def _expanded(self, given: dict[str, Any], struct: type[Config], key: str) -> dict[str, Any]:
        expand: Callable[[dict[str, Any]], dict[str, Any]] | None = getattr(struct, "expand", None)
        if expand is None:
            return given
        try:
            full = expand(given)
        except ValueError as error:
            self._problems.add(key, str(error))
            return given
        for name in full.keys() - given.keys():
            self._origins[f"{key}.{name}"] = f"preset {given.get('preset', '')}".strip()
        return full


def _sentence(error: msgspec.ValidationError) -> str:
    """`Expected `int` >= 1 - at `$[0]`` becomes `expected int >= 1 at [0]`."""
    text = str(error).replace("`", "").replace(" - at $", " at ")
    return text[:1].lower() + text[1:]
