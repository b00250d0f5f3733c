"""From structs back to plain data, TOML text and a digest."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import tomli_w

from forge_config.registry import type_name
from forge_config.struct import Config


def plain(value: Any) -> Any:
    """Dicts, lists and scalars, every default filled in; None is left out; open sections carry their `type`."""
    if isinstance(value, Config):
        name = type_name(type(value))
        tree = {"type": name} if name is not None else {}
        for field in msgspec.structs.fields(type(value)):
            item = getattr(value, field.name)
            if item is not None:
                tree[field.encode_name] = plain(item)
        return tree
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return msgspec.to_builtins(value)


def to_toml(value: Config) -> str:
    """TOML that loads to the same value."""
    return tomli_w.dumps(plain(value))


def digest(value: Config) -> str:
    """32 hex digits that name the value, however it was written and in whatever order."""
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def flat(tree: Any, key: str = "") -> dict[str, Any]:
    """Leaves by dotted key; items of a list of tables are `name[0].key`."""
    if isinstance(tree, dict) and (tree or not key):
        prefix = f"{key}." if key else ""
        return {k: v for name, item in tree.items() for k, v in flat(item, prefix + name).items()}
    if isinstance(tree, list) and tree and all(isinstance(item, dict) for item in tree):
        return {k: v for i, item in enumerate(tree) for k, v in flat(item, f"{key}[{i}]").items()}
    return {key: tree}
