"""Published shapes and how their checkpoints name things. Imports no torch."""

from copy import deepcopy
from typing import Any

from forge_model.families.family import Family as Family
from forge_model.families.llama import LLAMA as LLAMA
from forge_model.families.qwen import QWEN3 as QWEN3

FAMILIES: tuple[Family, ...] = (QWEN3, LLAMA)
"""Tried in this order when a model is exported; the first that can express it is taken."""


def preset(name: str) -> dict[str, Any]:
    """The keys of `[model]` of a preset, without `preset` itself.

    Raises:
        ValueError: there is no such preset; lists those that exist.
    """
    for family in FAMILIES:
        if name in family.presets:
            return deepcopy(family.presets[name])
    known = sorted(name for family in FAMILIES for name in family.presets)
    raise ValueError(f"unknown preset {name!r}; known: {', '.join(known)}")


__all__ = ["FAMILIES", "LLAMA", "QWEN3", "Family", "preset"]
