"""Converts a configuration of another stack to ours, and notes keys without a counterpart."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_config import ConfigError
from forge_config.override import parse
from forge_config.problem import Problems, nearest
from forge_config.toml import dumps

Tree = dict[str, Any]
SOURCES = 'data.sources=\'[{type="tokens",path="stores/mine"}]\''
"""An example of sources on a command line."""


@dataclass(frozen=True)
class Move:
    """A key that has a counterpart.

    Attributes:
        to: dotted key in Forge.
        values: Forge values by values of the other stack; default the same values.
    """

    to: str
    values: Mapping[Any, Any] | None = None


@dataclass(frozen=True)
class Drop:
    """A key that has no counterpart.

    Attributes:
        why: what Forge does instead.
        default: default in the other stack; a key with this value is omitted without a note.
    """

    why: str
    default: Any = None


@dataclass(frozen=True)
class Stack:
    """Another training stack.

    Attributes:
        name: name of the stack.
        keys: rule for each dotted key of the stack; None for keys that `finish` reads.
        finish: converts settings that depend on several keys, from the given tree and the number of ranks.
        numbers: keys whose values `finish` uses in arithmetic.
    """

    name: str
    keys: Mapping[str, Move | Drop | None]
    finish: Callable[[Converted, Mapping[str, Any], int | None], None]
    numbers: tuple[str, ...] = ()


@dataclass
class Converted:
    """A configuration converted to our keys.

    Attributes:
        tree: the configuration as nested tables.
        notes: omitted keys with the reason.
        problems: decisions that a person must make before the configuration can be used.
        decided: dotted keys of Forge that the person gives on the command line.
    """

    decided: Tree = field(default_factory=dict)
    tree: Tree = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def put(self, key: str, value: Any) -> None:
        """Set a dotted key."""
        *tables, name = key.split(".")
        table = self.tree
        for one in tables:
            table = table.setdefault(one, {})
        table[name] = value

    def ask(self, key: str, problem: str, example: str) -> None:
        """Add a problem, unless the command line gives `key` or keys below it."""
        if not any(f"{one}.".startswith(f"{key}.") for one in self.decided):
            self.problems.append(f"{problem}; decide it on this command line, such as --{example}")

    def decide(self) -> None:
        """Set the keys that the person gives; a different `type` drops the converted keys of its section."""
        for key, value in sorted(self.decided.items(), key=lambda one: not one[0].endswith(".type")):
            if key.endswith(".type"):
                self.put(key.removesuffix(".type"), {})
            self.put(key, value)

    def one_of(self, key: str, value: Any, values: Mapping[str, str]) -> str | None:
        """Return the Forge value for a value of the other stack; None and a problem if there is none."""
        if isinstance(value, str) and value in values:
            return values[value]
        self.problems.append(f"{key} = {value!r} has no counterpart; known: {', '.join(values)}")
        return None

    def toml(self) -> str:
        """Return the TOML text; omitted keys are comments at its top."""
        lines = [f"# not converted: {note}" for note in self.notes]
        return "\n".join([*lines, dumps(self.tree)])


def convert(path: Path, stack: Stack, ranks: int | None = None, flags: Sequence[str] = ()) -> Converted:
    """Translate a TOML file.

    Args:
        path: path of the file.
        stack: the stack of its keys.
        ranks: number of processes of the run; needed if a size depends on it.
        flags: decisions of a person, as `--section.key=value` in the keys of Forge.

    Raises:
        ConfigError: the file or a flag cannot be read, or a key is unknown to the stack.
    """
    try:
        settings = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    flat = flatten(settings, stack.keys)
    if unknown := sorted(flat.keys() - stack.keys.keys()):
        hints = "; ".join(f"{key} ({nearest(key, stack.keys)})" for key in unknown)
        raise ConfigError(f"{path} has keys that are not known to be of {stack.name}: {hints:.2000}")
    if wrong := [f"{key} = {flat[key]!r}" for key in stack.numbers if not _is_number(flat.get(key, 0))]:
        raise ConfigError(f"{path}: expected numbers, given {', '.join(wrong)}")
    converted = Converted(decided=_decided(flags))
    for key, value in flat.items():
        rule = stack.keys[key]
        if isinstance(rule, Drop):
            if value != rule.default:
                converted.notes.append(f"{key} = {value!r}: {rule.why}")
        elif isinstance(rule, Move):
            _move(converted, key, value, rule)
    stack.finish(converted, flat, ranks)
    converted.decide()
    return converted


def _decided(flags: Sequence[str]) -> Tree:
    problems = Problems({}, "command line")
    layer, _ = parse(flags, problems)
    problems.raise_if_any()
    return flatten(layer.tree, {})


def _move(made: Converted, key: str, value: Any, rule: Move) -> None:
    if rule.values is None:
        made.put(rule.to, value)
    elif isinstance(value, str | bool) and value in rule.values:
        made.put(rule.to, rule.values[value])
    else:
        known = ", ".join(map(str, rule.values))
        made.problems.append(f"{key} = {value!r} has no counterpart; known: {known}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def flatten(tree: Mapping[str, Any], keys: Mapping[str, Any], above: str = "") -> Tree:
    """Return dotted keys and their values; a table that `keys` names is one value."""
    found: Tree = {}
    for name, value in tree.items():
        key = f"{above}.{name}" if above else name
        if isinstance(value, Mapping) and key not in keys:
            found |= flatten(value, keys, key)
        else:
            found[key] = value
    return found
