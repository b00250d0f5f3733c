"""Keeps failures of trackers away from training."""

import logging
from collections.abc import Callable

from forge_trainer.track.base import Record, Tracker

log = logging.getLogger(__name__)


class Steadfast:
    """A tracker that never raises: failures are counted, and reported at the first one and at the end.

    Args:
        name: name of the tracker, for messages.
        make: opens the tracker; if it raises, every record is lost.

    Attributes:
        lost: number of records that the tracker did not accept.
    """

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.name = name
        self.lost = 0
        self._tracker: Tracker | None = None
        try:
            self._tracker = make()
        except Exception as error:  # a tracker must not end a run
            log.warning("%s cannot be opened, training goes on without: %s", name, error)

    def log(self, record: Record) -> None:
        """See `Tracker.log`."""
        try:
            if self._tracker is not None:
                self._tracker.log(record)
                return
        except Exception as error:  # a tracker must not end a run
            if not self.lost:
                log.warning("%s could not take a record, training goes on: %s", self.name, error)
        self.lost += 1

    def close(self) -> None:
        """See `Tracker.close`."""
        try:
            if self._tracker is not None:
                self._tracker.close()
        except Exception as error:  # a tracker must not end a run
            log.warning("%s could not be closed: %s", self.name, error)
        if self.lost:
            log.warning("%s did not take %d records", self.name, self.lost)
