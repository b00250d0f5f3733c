"""Kinds of model inputs that some parts need besides the tokens. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

SideKind = Literal["token", "other"]
"""`token`: a value for each token, [B, ..., T], which context parallelism shards; `other`: anything else."""

Needs = Mapping[str, SideKind]
"""The side inputs that a part needs, by name."""


def together(parts: Iterable[Needs]) -> dict[str, SideKind]:
    """Return the union of the side inputs that several parts need.

    Raises:
        ValueError: one name has two kinds.
    """
    found: dict[str, SideKind] = {}
    for needs in parts:
        for name, kind in needs.items():
            if found.setdefault(name, kind) != kind:
                raise ValueError(
                    f'the side input {name} is needed as "{found[name]}" and as "{kind}"; choose one'
                )
    return found
