"""What two configurations differ in."""

from __future__ import annotations

from typing import Any, NamedTuple

from forge_config.plain import flat, plain
from forge_config.struct import Config


class Change(NamedTuple):
    """One key with different values; None where a side does not have the key."""

    key: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.a!r} -> {self.b!r}"


def diff(a: Config, b: Config) -> list[Change]:
    """The keys that differ, in the order of their names."""
    left, right = flat(plain(a)), flat(plain(b))
    keys = sorted(left.keys() | right.keys())
    return [Change(key, left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)]
