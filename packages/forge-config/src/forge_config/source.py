"""Which keys a TOML file sets, and on which line each of them stands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from forge_config.keys import inside, item, join
from forge_config.lines import key_lines
from forge_config.registry import registry_of
from forge_config.shape import Shape, chosen, chosen_type, entry, fields_of, shown, struct_in
from forge_config.struct import ConfigError

Tree = dict[str, Any]

MAX_DEPTH = 50


@dataclass
class Layer:
    """A tree of values and where each key was set.

    Attributes:
        tree: the values.
        origins: where each was set, by dotted key.
        unused: what lower layers set in an open section whose `type` changed, though the new type has such a
            key too: `key = value (place)`, by dotted key.
    """

    tree: Tree = field(default_factory=dict[str, Any])
    origins: dict[str, str] = field(default_factory=dict[str, str])
    unused: dict[str, str] = field(default_factory=dict[str, str])

    def put(self, upper: Layer, shape: Shape) -> None:
        """Lay `upper` over this layer: tables merge, everything else is replaced.

        An open section whose `type` changes is replaced too: the keys of the other type mean nothing to it.

        Args:
            upper: the layer whose values win.
            shape: of the whole tree; tells which tables are open sections.
        """
        for key, lost in list(self._merge(self.tree, upper.tree, "", shape)):
            for name, value in lost.items():
                one = join(key, name)
                self.unused[one] = f"{one} = {shown(value)} ({self.origins.get(one, self.origins.get(key))})"
            self._forget(key)
            # What the table holds comes from above alone, though only the layer below may name it.
            self.origins[key] = next(at for known, at in upper.origins.items() if inside(f"{known}.", key))
        self.origins |= upper.origins

    def _merge(self, lower: Tree, upper: Tree, key: str, shape: Shape | None) -> Iterator[tuple[str, Tree]]:
        """Yields the keys of tables and arrays that are replaced, and what of them the new type has too."""
        merged = lower | upper
        for name, value in upper.items():
            below, inner = lower.get(name), join(key, name)
            kind = entry(shape, merged, name) if shape is not None else None
            if isinstance(below, dict) and isinstance(value, dict) and not _changes_type(kind, below, value):
                yield from self._merge(below, value, inner, kind)  # pyright: ignore[reportUnknownArgumentType]
            else:
                if isinstance(below, (dict, list)):
                    yield inner, _common(kind, below, value)
                lower[name] = copied(value)

    def _forget(self, key: str) -> None:
        self.origins = {known: at for known, at in self.origins.items() if not inside(known, key)}


def _changes_type(shape: Shape | None, below: Any, above: Any) -> bool:
    struct = struct_in(shape) if shape is not None else None
    registry = registry_of(struct) if struct is not None else None
    if registry is None or "type" not in above:
        return False
    return chosen_type(registry, below) not in (None, above["type"])


def _common(shape: Shape | None, below: Any, above: Any) -> Tree:
    """Entries of an open section whose `type` changes that its new type has too, and does not set."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return {}
    struct = struct_in(shape) if shape is not None else None
    new = chosen(struct, above) if struct is not None else None
    known = fields_of(new) if new is not None else ()
    return {name: one for name, one in below.items() if name in known and name not in above}  # pyright: ignore[reportUnknownVariableType]


def copied(value: Any) -> Any:
    """A copy that shares no table and no array."""
    if isinstance(value, dict):
        return {name: copied(inner) for name, inner in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return [copied(one) for one in value] if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]


def read(path: Path) -> Layer:
    """Parse one file.

    Raises:
        ConfigError: the file cannot be read, or is no TOML; names the file, line and column.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    try:
        tree = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: not valid TOML: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    if is_too_deep(tree):
        raise ConfigError(f"{path}: tables and arrays are nested more than {MAX_DEPTH} deep; flatten them")
    return Layer(tree, {key: f"{path}:{line}" for key, line in key_lines(text).items()})


def is_too_deep(value: Any) -> bool:
    """Whether tables and arrays are nested deeper than the recursive functions of this package can follow."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)  # pyright: ignore[reportUnknownVariableType]
        ]
    return any(isinstance(one, (dict, list)) for one in level)


def places(value: Any, key: str, place: str) -> dict[str, str]:
    """One origin for a key and for everything inside its value."""
    found = {key: place}
    if isinstance(value, dict):
        for name, inner in value.items():  # pyright: ignore[reportUnknownVariableType]
            found |= places(inner, join(key, str(name)), place)  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(value, list):
        for index, inner in enumerate(value):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            found |= places(inner, item(key, index), place)
    return found
