"""What the docstring of a struct says about it and its fields (the `Attributes:` section of Google style)."""

from __future__ import annotations

import inspect
import re
from functools import cache

from forge_config.struct import Config

_ATTRIBUTE = re.compile(
    r"^ {4}(\w+)(?: \([^)]*\))?: *(.*(?:\n(?: {5,}\S.*|[ \t]*(?=\n {5,})))*)", re.MULTILINE
)
_SECTION = re.compile(r"^(?:Attributes|Args|Raises|Returns|Example|Examples|Source|Note):", re.MULTILINE)


@cache
def descriptions(struct: type[Config]) -> dict[str, str]:
    """The text of each field from the `Attributes:` sections of the struct and its bases."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        _, _, rest = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        section = _SECTION.split(rest)[0]
        found |= {name: " ".join(text.split()) for name, text in _ATTRIBUTE.findall(section)}
    return found


def summary(struct: type[Config]) -> str:
    """The first paragraph of the docstring."""
    return " ".join(inspect.cleandoc(struct.__doc__ or "").split("\n\n")[0].split())
