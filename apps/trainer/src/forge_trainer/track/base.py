"""The interface of trackers."""

from collections.abc import Mapping
from typing import Protocol

Record = Mapping[str, float]
"""Numbers by name; `step` and `tokens` are always present."""


class Tracker(Protocol):
    """A destination of metrics, which takes one record at a time. It exists on the first rank only."""

    def log(self, record: Record) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...
