"""Which keys a TOML file sets, and on which line each of them stands."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from forge_config.struct import ConfigError

Tree = dict[str, Any]

_KEY = r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'"""
_DOTTED = rf"(?:{_KEY})(?:\s*\.\s*(?:{_KEY}))*"
_TABLE = re.compile(rf"\s*(\[\[?)\s*({_DOTTED})\s*\]")
_ASSIGNMENT = re.compile(rf"\s*({_DOTTED})\s*=")


@dataclass
class Layer:
    """A tree of values and where each dotted key was set; keys of array tables are `name[0].key`."""

    tree: Tree = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def put(self, upper: Layer) -> None:
        """Lay `upper` over this layer: tables merge, everything else is replaced."""
        self._merge(self.tree, upper.tree, "")
        self.origins |= upper.origins

    def _merge(self, lower: Tree, upper: Tree, prefix: str) -> None:
        for name, value in upper.items():
            key = prefix + name
            below = lower.get(name)
            if isinstance(below, dict) and isinstance(value, dict):
                if value.get("type", below.get("type")) != below.get("type"):
                    below.clear()
                    self._forget(key)
                self._merge(below, value, key + ".")
            else:
                self._forget(key)
                lower[name] = _copied(value)

    def _forget(self, key: str) -> None:
        for known in [k for k in self.origins if k.startswith((key + ".", key + "["))]:
            del self.origins[known]


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    return [_copied(v) for v in value] if isinstance(value, list) else value


def read(path: Path) -> Layer:
    """Parse one file.

    Raises:
        ConfigError: the file cannot be read, or is no TOML; names the file, line and column.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        tree = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: not valid TOML: {error.msg}") from None
    return Layer(tree, {key: f"{path}:{line}" for key, line in key_lines(text).items()})


def key_lines(text: str) -> dict[str, int]:
    """The line of each key of a TOML document, counted from 1. Keys inside inline tables are left out."""
    lines: dict[str, int] = {}
    arrays: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _TABLE.match(line):
            table = _inside_arrays(_dotted(match[2]), arrays)
            if match[1] == "[[":
                name = _dotted(match[2])
                arrays[name] = arrays.get(name, -1) + 1
                lines.setdefault(table.removesuffix(f"[{arrays[name] - 1}]"), number)
                table = _inside_arrays(name, arrays)
            lines.setdefault(table, number)
        elif match := _ASSIGNMENT.match(line):
            key = _dotted(match[1])
            lines.setdefault(f"{table}.{key}" if table else key, number)
    return lines


def _dotted(text: str) -> str:
    return ".".join(part.strip("\"' ") for part in re.findall(_KEY, text))


def _inside_arrays(name: str, arrays: dict[str, int]) -> str:
    """`sources.tokenizer` becomes `sources[1].tokenizer` after the second `[[sources]]`."""
    done = ""
    for part in name.split("."):
        done = f"{done}.{part}" if done else part
        plain = re.sub(r"\[\d+\]", "", done)
        if plain in arrays:
            done += f"[{arrays[plain]}]"
    return done
