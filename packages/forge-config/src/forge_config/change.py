"""What may change when something that was started with one configuration goes on with another."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple, cast

from forge_config.diff import Change, diff
from forge_config.keys import item, join
from forge_config.plain import is_table_array, plain
from forge_config.shape import fields_of
from forge_config.struct import ALL_KEYS, Config


class MayChange(Enum):
    """Whether a key may have another value later; said by `free_keys` and `recorded_keys` of its struct."""

    NEVER = "never"
    """The default."""
    RECORDED = "recorded"
    """As an event that is written down: it changes what is computed from then on."""
    FREELY = "freely"
    """It changes how something is computed, not what."""


class Judged(NamedTuple):
    """A difference between two configurations, and whether it may be."""

    change: Change
    may: MayChange


def may_change(struct: type[Config], name: str) -> MayChange:
    """Whether the key `name` of a struct may change; the struct itself has precedence over its bases."""
    for base in struct.__mro__:
        if not issubclass(base, Config):
            break
        recorded, free = base.__dict__.get("recorded_keys", ()), base.__dict__.get("free_keys", ())
        if name in recorded or (ALL_KEYS in recorded and name not in free):
            return MayChange.RECORDED
        if name in free or ALL_KEYS in free:
            return MayChange.FREELY
    return MayChange.NEVER


def changeable(value: Config) -> dict[str, MayChange]:
    """For each key of a configuration, by its dotted name, whether it may change.

    What a struct says of a key that is a section holds for the whole section; of a key it says nothing about,
    the struct of that section decides.
    """
    return dict(_walk(value, plain(value), "", MayChange.NEVER))


def judge(a: Config, b: Config) -> list[Judged]:
    """The keys that differ, and whether each may.

    Raises:
        ConfigError: a value cannot be written in TOML.
    """
    rules = changeable(a), changeable(b)
    order = list(MayChange)
    added = tuple(f"{one}." for one in _added_items(a, b, ""))
    judged: list[Judged] = []
    for change in diff(a, b):
        rulings = [rule[change.key] for rule in rules if change.key in rule]
        is_added = change.key.startswith(added)
        judged.append(Judged(change, MayChange.RECORDED if is_added else min(rulings, key=order.index)))
    return judged


def _added_items(a: Any, b: Any, key: str) -> Iterator[str]:
    """The keys of items that `b` has behind those of `a`, of arrays that may grow."""
    if not isinstance(a, Config) or type(a) is not type(b):
        return
    for name, field in fields_of(type(a)).items():
        mine, theirs, at = getattr(a, field.name), getattr(b, field.name), join(key, name)
        if name in type(a).growing_keys:
            yield from (item(at, index) for index in range(len(mine), len(theirs)))
        yield from _added_items(mine, theirs, at)


def _walk(value: Any, tree: Any, key: str, above: MayChange) -> Iterator[tuple[str, MayChange]]:
    """Leaves as `forge_config.plain.flat` names them. `tree` is the plain form of `value`."""
    if isinstance(value, Config):
        fields = fields_of(type(value))
        for name, inner in cast(dict[str, Any], tree).items():
            may = may_change(type(value), name) if above is MayChange.NEVER else above
            child = getattr(value, fields[name].name) if name in fields else None
            yield from _walk(child, inner, join(key, name), may)
    elif isinstance(tree, dict) and tree:
        table = cast(dict[str, Any], tree)
        for name, inner in table.items():
            child = cast(dict[Any, Any], value).get(name) if isinstance(value, dict) else None
            yield from _walk(child, inner, join(key, name), above)
    elif is_table_array(tree):
        for i, inner in enumerate(cast(list[Any], tree)):
            yield from _walk(cast(list[Any], value)[i], inner, item(key, i), above)
    else:
        yield key, above
