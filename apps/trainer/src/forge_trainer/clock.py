"""How long training took, evaluation and saving left out."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """A stopwatch with laps that can be paused."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._paused_s = 0.0

    def lap(self) -> float:
        """Seconds since the last lap, pauses left out."""
        now = time.perf_counter()
        lap_s = now - self._start - self._paused_s
        self._start, self._paused_s = now, 0.0
        return max(lap_s, 1e-9)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time spent inside."""
        start = time.perf_counter()
        yield
        self._paused_s += time.perf_counter() - start
