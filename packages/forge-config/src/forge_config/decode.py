"""From a tree of plain values to structs, noting every mistake instead of stopping at the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from msgspec import inspect as shapes

from forge_config.keys import item, join
from forge_config.problem import Problems, unknown
from forge_config.registry import registry_of, type_name
from forge_config.scalar import Mismatch, fits_length, mismatch, scalar
from forge_config.shape import (
    ARRAYS,
    Shape,
    accepts_text,
    chosen_type,
    default_of,
    fields_of,
    members,
    optional,
    shown,
    struct_of,
    words,
)
from forge_config.source import Tree, copied, places
from forge_config.struct import Config, sentences_of

NONE = "none"
"""How None is written where leaving the key out would mean a default that is not None."""


class _Failed:
    """Stands for a value that could not be decoded; its problem is noted."""


FAILED: Any = _Failed()


class Decoder:
    """Decodes trees.

    Args:
        problems: takes what is wrong.
        origins: where each key was set; keys that presets add are noted here.
        raw: the literal text of command-line values by key.
        complete: False when a layer is missing, so that absent keys say nothing.
    """

    def __init__(
        self,
        problems: Problems,
        origins: dict[str, str],
        raw: Mapping[str, str],
        complete: bool = True,
    ) -> None:
        self._problems = problems
        self._origins = origins
        self._raw = raw
        self._complete = complete

    def value(self, value: Any, shape: Shape, key: str) -> Any:
        """One value of any shape, or FAILED."""
        if value == NONE and optional(shape) and not _takes_none_as_text(shape):
            return None
        fitting = [one for one in members(shape) if _same_kind(value, one)]
        if not fitting:
            return self._fail(key, mismatch(value, shape))
        if isinstance(value, dict):
            return self._table(cast(Tree, value), fitting[0], key)
        if isinstance(value, list) and not isinstance(fitting[0], shapes.AnyType):
            return self._array(cast(list[Any], value), fitting[0], key)
        return self._scalar(value, fitting, shape, key)

    def _fail(self, key: str, text: str) -> Any:
        self._problems.add(key, text)
        return FAILED

    def _scalar(self, value: Any, fitting: list[Shape], shape: Shape, key: str) -> Any:
        mistakes: list[Mismatch] = []
        for one in fitting:
            try:
                return scalar(value, one)
            except Mismatch as mistake:
                mistakes.append(mistake)
        if key in self._raw and not isinstance(value, str) and accepts_text(shape):
            return self.value(self._raw[key], shape, key)
        return self._fail(key, str(mistakes[0]) if len(members(shape)) == 1 else mismatch(value, shape))

    def _array(self, values: list[Any], shape: Shape, key: str) -> Any:
        if isinstance(shape, shapes.TupleType):
            if len(values) != len(shape.item_types):
                return self._fail(key, mismatch(values, shape))
            inner = shape.item_types
        else:
            assert isinstance(shape, (shapes.ListType, shapes.VarTupleType))
            if not fits_length(len(values), shape):
                return self._fail(key, mismatch(values, shape))
            inner = (shape.item_type,) * len(values)
        items = [
            self.value(one, kind, item(key, i))
            for i, (one, kind) in enumerate(zip(values, inner, strict=True))
        ]
        if any(one is FAILED for one in items):
            return FAILED
        return items if isinstance(shape, shapes.ListType) else tuple(items)

    def _table(self, table: Tree, shape: Shape, key: str) -> Any:
        if isinstance(shape, shapes.StructType):
            return self.section(table, struct_of(shape), key)
        if not isinstance(shape, shapes.DictType):
            return table
        entries = {name: self.value(one, shape.value_type, join(key, name)) for name, one in table.items()}
        return FAILED if any(one is FAILED for one in entries.values()) else entries

    def section(self, table: Tree, struct: type[Config], key: str) -> Any:
        """One section, closed or open, or FAILED."""
        actual, table = self._struct_of(table, struct, key)
        if actual is None:
            return FAILED
        values = self.fields(table, actual, key)
        if not self._complete or any(one is FAILED for one in values.values()):
            return FAILED
        try:
            return actual(**values)
        except ValueError as error:
            for sentence in sentences_of(error):
                self._problems.add_sentence(key, sentence, fields_of(actual))
            return FAILED

    def _struct_of(self, table: Tree, struct: type[Config], key: str) -> tuple[type[Config] | None, Tree]:
        """The struct that a section is decoded with, and the section without the key `type` that chose it."""
        registry = registry_of(struct)
        rest = {name: one for name, one in table.items() if name != "type"}
        if registry is None:
            # A registered struct that a field names directly: its `type` may be written, but chooses nothing.
            return (struct, rest if table.get("type") == type_name(struct) is not None else table)
        name = chosen_type(registry, table)
        known = ", ".join(sorted(registry))
        if name is None:
            self._problems.add(key, f"no type given; expected type = one of {known}")
        elif not isinstance(name, str):
            self._problems.add(join(key, "type"), f"given {shown(name)}; expected one of {known}")
        elif name not in registry:
            message = unknown(f"{registry.section} type", name, registry)
            joined = (
                "" if "did you mean" in message else '; one of your own joins by imports = ["its_module"]'
            )
            self._problems.add(join(key, "type"), f"{message}{joined}")
        else:
            return registry[name], rest
        return None, rest

    def fields(self, table: Tree, struct: type[Config], key: str) -> Tree:
        """Every field of a struct by name; FAILED where it could not be decoded."""
        table, complete = self._expanded(table, struct, key)
        fields = fields_of(struct)
        values: Tree = {}
        known = [*fields, "type"] if type_name(struct) is not None else fields
        for name in table:
            if name not in fields:
                self._problems.add_unknown(join(key, name), known)
                values[name] = FAILED
        for name, field in fields.items():
            if name in table:
                values[field.name] = self.value(table[name], field.type, join(key, name))
            elif not field.required:
                values[field.name] = default_of(field)
            elif isinstance(field.type, shapes.StructType):
                values[field.name] = self.section({}, struct_of(field.type), join(key, name))
            else:
                values[field.name] = FAILED
                if complete:
                    self._problems.add(join(key, name), f"missing; expected {words(field.type)}")
        return values

    def _expanded(self, table: Tree, struct: type[Config], key: str) -> tuple[Tree, bool]:
        """The table with its preset filled in, and whether an absent key is now really missing."""
        expand: Callable[[Tree], Tree] | None = getattr(struct, "expand", None)
        if expand is None:
            return table, self._complete
        try:
            full = expand(copied(table))
        except ValueError as error:
            self._problems.add_sentence(key, str(error), table)
            return table, False
        name = table.get("preset")
        folder = table.get("from")
        place = f"preset {name}" if name else f"from {folder}" if folder else "filled in"
        self._note_preset(table, full, key, place)
        return full, self._complete

    def _note_preset(self, table: Tree, full: Tree, key: str, place: str) -> None:
        for name, value in full.items():
            inner = join(key, name)
            below = table.get(name)
            if name not in table:
                self._origins.update(places(value, inner, place))
            elif isinstance(value, dict) and isinstance(below, dict):
                self._note_preset(cast(Tree, below), cast(Tree, value), inner, place)


def _same_kind(value: Any, shape: Shape) -> bool:
    """Whether a value is a table, an array or a scalar as the shape is."""
    if isinstance(shape, shapes.AnyType):
        return True
    if isinstance(shape, (shapes.StructType, shapes.DictType)):
        return isinstance(value, dict)
    return isinstance(value, list) == isinstance(shape, ARRAYS) and not isinstance(value, dict)


def _takes_none_as_text(shape: Shape) -> bool:
    literals = [one.values for one in members(shape) if isinstance(one, shapes.LiteralType)]
    return accepts_text(shape) or any(NONE in values for values in literals)
