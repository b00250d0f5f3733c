"""Where the value of each key of a resolved configuration comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_config.plain import flat

DEFAULT = "default"


def trace(tree: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, str]:
    """The origin of each leaf of a resolved tree.

    Args:
        tree: plain data with every default filled in.
        given: what files, flags and presets set, by key.

    Returns:
        By dotted key: `file:line`, the flag, `preset NAME` or `default`.
    """
    return {key: given.get(key, DEFAULT) for key in flat(tree)}
