"""JSON schema of a configuration file, for completion and checks in an editor (taplo, Even Better TOML)."""

from __future__ import annotations

from typing import Any

from msgspec import inspect as shapes

from forge_config.decode import NONE
from forge_config.describe import descriptions, summary
from forge_config.plain import plain
from forge_config.registry import Registry, registry_of, type_name
from forge_config.shape import (
    NUMBERS,
    Shape,
    accepts_text,
    default_of,
    fields_of,
    members,
    optional,
    struct_of,
)
from forge_config.struct import Config

Schema = dict[str, Any]

_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_NAMES: Schema = {"type": "array", "items": {"type": "string"}}


def schema(struct: type[Config], partial: bool = True) -> Schema:
    """JSON schema (2020-12) of a whole file.

    Args:
        struct: the struct of the whole file.
        partial: of one layer, which may leave every key to the files that it extends and to `type` of theirs.
            False: of a resolved file, where required keys must be there.
    """
    writer = _Writer(partial)
    root = writer.table(struct)
    if partial:
        extends = {"anyOf": [{"type": "string"}, _NAMES], "description": "files that this one builds on"}
        root["properties"] |= {
            "extends": extends,
            "imports": _NAMES | {"description": "modules to import before the sections are read"},
        }
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": struct.__name__}
    return head | root | {"$defs": writer.defs}


class _Writer:
    """Writes each struct once, under `$defs`, so that structs may hold themselves."""

    def __init__(self, partial: bool) -> None:
        self.defs: dict[str, Schema] = {}
        self._partial = partial
        self._names: dict[type[Config], str] = {}

    def table(self, struct: type[Config]) -> Schema:
        texts = descriptions(struct)
        properties: Schema = {}
        required: list[str] = []
        for name, field in fields_of(struct).items():
            entry = self.of(field.type)
            if name in texts:
                entry["description"] = texts[name]
            if not field.required and (default := default_of(field)) is not None:
                entry["default"] = plain(default, field.type)
                if optional(field.type) and not accepts_text(field.type):
                    entry = {"anyOf": [entry, {"const": NONE}]}
            elif field.required and not isinstance(field.type, shapes.StructType):
                required.append(name)
            properties[name] = entry
        made: Schema = {"type": "object", "description": summary(struct), "properties": properties}
        # A preset may fill any key in, so none can be demanded beside it.
        if required and not self._partial and not hasattr(struct, "expand"):
            made["required"] = required
        return made | {"additionalProperties": False}

    def of(self, shape: Shape) -> Schema:
        kinds = [self._one(one) for one in members(shape)]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}

    def _one(self, shape: Shape) -> Schema:
        if isinstance(shape, shapes.StructType):
            struct = struct_of(shape)
            registry = registry_of(struct)
            return self._reference(struct) if registry is None else self._open(registry)
        if isinstance(shape, shapes.DictType):
            return {"type": "object", "additionalProperties": self.of(shape.value_type)}
        if isinstance(shape, shapes.TupleType):
            size = len(shape.item_types)
            items = [self.of(one) for one in shape.item_types]
            return {"type": "array", "prefixItems": items, "minItems": size, "maxItems": size}
        if isinstance(shape, (shapes.ListType, shapes.VarTupleType)):
            sizes = {"minItems": shape.min_length, "maxItems": shape.max_length}
            return {"type": "array", "items": self.of(shape.item_type)} | _given(sizes)
        return _scalar(shape)

    def _reference(self, struct: type[Config]) -> Schema:
        if struct not in self._names:
            taken = struct.__name__ in self._names.values()
            name = f"{struct.__module__}.{struct.__name__}" if taken else struct.__name__
            self._names[struct] = name
            self.defs[name] = self.table(struct)
            if chosen := type_name(struct):
                self.defs[name]["properties"] = {"type": {"const": chosen}} | self.defs[name]["properties"]
        return {"$ref": f"#/$defs/{self._names[struct]}"}

    def _open(self, registry: Registry[Any]) -> Schema:
        choices: list[Schema] = []
        for name in registry:
            choice = self._reference(registry[name])
            if name != registry.default and not self._partial:
                choice = choice | {"required": ["type"]}
            choices.append(choice)
        # Without `type`, a layer fits any of them.
        known = {"type": "object", "properties": {"type": {"enum": list(registry)}}}
        return known | ({"anyOf" if self._partial else "oneOf": choices} if choices else {})


def _scalar(shape: Shape) -> Schema:
    if isinstance(shape, NUMBERS):
        bounds = {name: getattr(shape, bound) for bound, name in _BOUNDS.items()}
        kind = "integer" if isinstance(shape, shapes.IntType) else "number"
        return {"type": kind} | _given(bounds | {"multipleOf": shape.multiple_of})
    if isinstance(shape, shapes.StrType):
        limits = {"minLength": shape.min_length, "maxLength": shape.max_length, "pattern": shape.pattern}
        return {"type": "string"} | _given(limits)
    if isinstance(shape, shapes.LiteralType):
        return {"enum": list(shape.values)}
    if isinstance(shape, shapes.BoolType):
        return {"type": "boolean"}
    return {} if isinstance(shape, shapes.AnyType) else {"type": "string"}


def _given(limits: Schema) -> Schema:
    return {name: limit for name, limit in limits.items() if limit is not None}
