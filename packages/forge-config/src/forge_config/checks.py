"""Checks over several sections: plain functions whose parameters are named like the sections they need."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from forge_config.decode import FAILED
from forge_config.problem import Problems
from forge_config.struct import sentences_of

Check = Callable[..., Iterable[str] | None]
"""Raises ValueError, or yields or returns sentences, each saying what is given, expected and to do."""


def run(check: Check, sections: Mapping[str, Any], problems: Problems) -> None:
    """Run one check if all the sections that it names are valid.

    Raises:
        TypeError: a parameter of the check is no section (a bug of the check).
    """
    names = list(inspect.signature(check).parameters)
    strangers = [name for name in names if name not in sections]
    if strangers:
        title = getattr(check, "__name__", repr(check))
        raise TypeError(f"check {title} names {', '.join(strangers)}; expected among {', '.join(sections)}")
    if any(sections[name] is FAILED for name in names):
        return
    try:
        for sentence in check(**{name: sections[name] for name in names}) or ():
            problems.add_sentence("", sentence)
    except ValueError as error:
        for sentence in sentences_of(error):
            problems.add_sentence("", sentence)
