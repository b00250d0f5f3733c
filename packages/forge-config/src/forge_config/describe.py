"""What the keys of a struct mean: a JSON schema for editors, and a reference page."""

from __future__ import annotations

import inspect
import re
from typing import Annotated, Any, get_args, get_origin

import msgspec

from forge_config.decode import default_of, fields_of, struct_in
from forge_config.plain import plain
from forge_config.registry import Registry, registry_of
from forge_config.struct import Config

_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {5,}\S.*)*)", re.MULTILINE)


def descriptions(struct: type[Config]) -> dict[str, str]:
    """The text of each field from the `Attributes:` sections of the struct and its bases."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        doc = inspect.cleandoc(base.__doc__ or "")
        _, _, attributes = doc.partition("Attributes:\n")
        found |= {name: " ".join(text.split()) for name, text in _ATTRIBUTE.findall(attributes)}
    return found


def summary(struct: type[Config]) -> str:
    """The first paragraph of the docstring."""
    return " ".join(inspect.cleandoc(struct.__doc__ or "").split("\n\n")[0].split())


def schema(struct: type[Config]) -> dict[str, Any]:
    """JSON schema (2020-12) of a whole file, for completion and checks in an editor."""
    whole = _object(struct)
    whole["properties"] |= {
        "extends": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "imports": {"type": "array", "items": {"type": "string"}, "description": "modules to import first"},
    }
    whole.pop("required", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": struct.__name__} | whole


def _object(struct: type[Config], type_name: str | None = None) -> dict[str, Any]:
    texts = descriptions(struct)
    properties: dict[str, Any] = {}
    required: list[str] = []
    if type_name is not None:
        properties["type"] = {"const": type_name}
    for name, field in fields_of(struct).items():
        entry = dict(_of(field.type))
        if name in texts:
            entry["description"] = texts[name]
        if not field.required and (default := plain(default_of(field))) is not None:
            entry["default"] = default
        elif field.required and struct_in(field.type) is None:
            required.append(name)
        properties[name] = entry
    made: dict[str, Any] = {"type": "object", "description": summary(struct), "properties": properties}
    # A preset may fill any key in, so none can be demanded beside it.
    if required and not hasattr(struct, "expand"):
        made["required"] = required
    return made | {"additionalProperties": False}


def _of(annotation: Any) -> dict[str, Any]:
    if struct := struct_in(annotation):
        registry = registry_of(struct)
        return _object(struct) if registry is None else _open(registry)
    arguments = get_args(annotation)
    if get_origin(annotation) in (list, tuple) and arguments and struct_in(arguments[0]):
        return {"type": "array", "items": _of(arguments[0])}
    if get_origin(annotation) is dict and struct_in(arguments[1]):
        return {"type": "object", "additionalProperties": _of(arguments[1])}
    return msgspec.json.schema(annotation)


def _open(registry: Registry[Any]) -> dict[str, Any]:
    choices = [_object(registry[name], name) for name in registry]
    for choice, name in zip(choices, registry, strict=True):
        if name != registry.default:
            choice["required"] = ["type", *choice.get("required", [])]
    return {"oneOf": choices}


def reference_markdown(struct: type[Config]) -> str:
    """A page with every section of a file: key, type, default, meaning."""
    parts = [
        "# Configuration reference\n\nGenerated from the structs. A key without a default must be given.\n"
    ]
    for name, field in fields_of(struct).items():
        section = struct_in(field.type) or struct_in((get_args(field.type) or (None,))[-1])
        if section is None:
            continue
        shown = f"{name}.<name>" if get_origin(field.type) is dict else name
        parts += _section(f"[{shown}]", section, depth=2)
    return "\n".join(parts)


def _section(title: str, struct: type[Config], depth: int) -> list[str]:
    registry = registry_of(struct)
    if registry is None:
        return [f"{'#' * depth} `{title}`\n", summary(struct) + "\n", *_table(title, struct, depth)]
    parts = [
        f"{'#' * depth} `{title}`\n",
        f"{summary(struct)} One of: {', '.join(f'`{n}`' for n in registry)}.\n",
    ]
    for name in registry:
        default = " (default)" if name == registry.default else ""
        parts += [
            f'{"#" * (depth + 1)} `{title}` with `type = "{name}"`{default}\n',
            summary(registry[name]) + "\n",
        ]
        parts += _table(title, registry[name], depth + 1)
    return parts


def _table(title: str, struct: type[Config], depth: int) -> list[str]:
    texts = descriptions(struct)
    rows, nested = [], []
    for name, field in fields_of(struct).items():
        inner = struct_in(field.type) or struct_in((get_args(field.type) or (None,))[0])
        default = "" if field.required else f"`{plain(default_of(field))!r}`"
        rows.append(f"| `{name}` | {shown_type(field.type)} | {default} | {texts.get(name, '')} |")
        if inner is not None:
            many = get_origin(field.type) in (list, tuple)
            path = f"{title.strip('[]')}.{name}"
            nested += _section(f"[[{path}]]" if many else f"[{path}]", inner, min(depth + 1, 5))
    head = ["| key | type | default | meaning |", "|---|---|---|---|"] if rows else ["No keys of its own."]
    return [*head, *rows, "", *nested]


def shown_type(annotation: Any) -> str:
    """A type as a reader of TOML would say it, bounds included."""
    if get_origin(annotation) is Annotated:
        base, *metas = get_args(annotation)
        signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "pattern": "like", "min_length": "length ≥"}
        bounds = [
            f"{sign} {bound}"
            for meta in metas
            for name, sign in signs.items()
            if (bound := getattr(meta, name, None)) is not None
        ]
        return shown_type(base) + (f" {', '.join(bounds)}" if bounds else "").replace("|", "\\|")
    if annotation is type(None):
        return "absent"
    if get_origin(annotation) is None:
        return "table" if struct_in(annotation) else getattr(annotation, "__name__", str(annotation))
    arguments = [repr(a) if isinstance(a, str) else shown_type(a) for a in get_args(annotation)]
    name = getattr(get_origin(annotation), "__name__", "")
    return (
        f"{name} of {', '.join(arguments)}" if name in ("list", "dict", "tuple") else " or ".join(arguments)
    )
