"""The interface of trackers."""

from collections.abc import Mapping
from typing import Protocol

Record = Mapping[str, float]
"""Numbers by name; always holds `step` and `tokens`."""


class Tracker(Protocol):
    """Takes one record at a time. Lives on the first rank only."""

    def log(self, record: Record) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...
