"""Converts logged values to numbers."""

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

_TOLD: set[str] = set()
"""Names for which this process has printed a warning."""


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Convert single numbers to floats; other values are dropped, with one warning for each name.

    Args:
        values: numbers of Python or NumPy, or tensors of one element, by name.
    """
    found: dict[str, float] = {}
    for name, value in values.items():
        try:
            if isinstance(value, str | bytes):
                raise TypeError("a text")
            found[str(name)] = value if isinstance(value, int) else float(value)
        except Exception as error:  # whatever a value raises, it must not end a run
            if name not in _TOLD:
                _TOLD.add(name)
                log.warning(
                    "%s is not logged, as it is no number: %s (%s)", name, type(value).__name__, error
                )
    return found
