"""A configuration reference in Markdown, written from the structs."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import inspect as shapes

from forge_config.change import MayChange, may_change
from forge_config.describe import descriptions, summary
from forge_config.plain import is_table_array, plain
from forge_config.registry import registry_of
from forge_config.shape import Shape, default_of, fields_of, members, struct_in, struct_of, words
from forge_config.struct import Config
from forge_config.toml import dumps

_MAY_CHANGE = {
    MayChange.NEVER: "",
    MayChange.RECORDED: "*May change, recorded.*",
    MayChange.FREELY: "*May change.*",
}
DEEPEST = 5
"""The level of heading that nested sections do not go below."""


def reference_markdown(struct: type[Config]) -> str:
    """A page with every section of a file: key, type, default, meaning.

    Args:
        struct: the struct of the whole file. All registries must be filled, by importing the plugs.
    """
    parts = [
        "# Configuration reference\n",
        "Generated from the structs. A key without a default must be given.\n",
    ]
    top, nested = _table(struct, "", ())
    if top:
        parts += top
    for title, inner in nested:
        parts += _section(title, inner, 2, ())
    return "\n".join(parts)


def _section(title: str, struct: type[Config], depth: int, around: tuple[type[Config], ...]) -> Iterator[str]:
    """`around` are the structs that this one stands in; one that holds itself is written once."""
    registry = registry_of(struct)
    yield f"{'#' * depth} `{title}`\n"
    if registry is None:
        yield summary(struct) + "\n"
        yield from _body(title, struct, depth, around)
        return
    yield f"{summary(struct)} One of: {', '.join(f'`{name}`' for name in registry)}.\n"
    for name in registry:
        default = " (default)" if name == registry.default else ""
        yield f'{"#" * min(depth + 1, DEEPEST)} `{title}` with `type = "{name}"`{default}\n'
        yield summary(registry[name]) + "\n"
        yield from _body(title, registry[name], min(depth + 1, DEEPEST), (*around, struct))


def _body(title: str, struct: type[Config], depth: int, around: tuple[type[Config], ...]) -> Iterator[str]:
    rows, nested = _table(struct, title.strip("[]"), (*around, struct))
    yield from rows or ["No keys of its own.\n"]
    for inner_title, inner in nested:
        yield from _section(inner_title, inner, min(depth + 1, DEEPEST), (*around, struct))


def _table(
    struct: type[Config], key: str, around: tuple[type[Config], ...]
) -> tuple[list[str], list[tuple[str, type[Config]]]]:
    """The rows of the keys that are no sections of their own, and the sections with their titles."""
    texts = descriptions(struct)
    rows: list[str] = []
    nested: list[tuple[str, type[Config]]] = []
    for name, field in fields_of(struct).items():
        path = f"{key}.{name}" if key else name
        inner = [found for one in members(field.type) if (found := _holds(one, path))]
        written = [found for found in inner if found[1] not in around]
        nested += written
        if inner and not key:
            continue
        sections = [f"See `{title}`." for title, _ in written]
        sentences = [texts.get(name, ""), *sections, _MAY_CHANGE[may_change(struct, name)]]
        about = " ".join(filter(None, sentences))
        cells = [f"`{name}`", words(field.type), _default(field), about]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if rows:
        rows = ["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""]
    return rows, nested


def _holds(shape: Shape, path: str) -> tuple[str, type[Config]] | None:
    """The struct inside a field, alone, in a table of tables or in an array, and the title of its section."""
    if isinstance(shape, shapes.StructType):
        return f"[{path}]", struct_of(shape)
    if isinstance(shape, shapes.DictType) and (inner := struct_in(shape.value_type)):
        return f"[{path}.NAME]", inner
    if isinstance(shape, (shapes.ListType, shapes.VarTupleType)) and (inner := struct_in(shape.item_type)):
        return f"[[{path}]]", inner
    return None


def _default(field: shapes.Field) -> str:
    if field.required:
        return ""
    value = default_of(field)
    if value is None:
        return "absent"
    written = plain(value, field.type)
    if isinstance(value, Config):
        return f'`type = "{written["type"]}"`' if "type" in written else "its defaults"
    if isinstance(written, dict) or is_table_array(written):
        return "`{}`" if not written else "a table"
    return f"`{dumps({'k': written}).removeprefix('k = ').strip()}`"
