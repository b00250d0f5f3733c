"""Differences between two configurations."""

from __future__ import annotations

from typing import Any, NamedTuple

from forge_config.plain import canonical, flat, plain
from forge_config.shape import shown
from forge_config.struct import Config


class Change(NamedTuple):
    """One key with different values; None where a side does not have the key."""

    key: str
    a: Any
    b: Any

    def __str__(self) -> str:
        a, b = ("(absent)" if side is None else shown(side) for side in (self.a, self.b))
        return f"{self.key}: {a} -> {b}"


def diff(a: Config, b: Config) -> list[Change]:
    """The keys that differ, in the order of their names.

    Raises:
        ConfigError: a value cannot be written in TOML, so that it has no plain form to compare.
    """
    left, right = flat(plain(a)), flat(plain(b))
    changes = [Change(key, left.get(key), right.get(key)) for key in sorted(left.keys() | right.keys())]
    return [change for change in changes if canonical(change.a) != canonical(change.b)]
