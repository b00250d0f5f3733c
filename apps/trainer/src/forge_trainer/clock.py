"""Measures where the time of a run goes: every second belongs to a named span."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TRAINING = frozenset({"data", "step", "agree", "log"})
"""Spans that are part of training; speed is measured over these and over the time outside all spans."""

BUILD, STEP = "build", "step"
"""The span before the loop, and the span of a training step."""

BETWEEN = "between"
"""The time outside all spans. Listeners get its lengths; no total contains them."""

END = "end"
"""The time from the end of training to the end of the process."""


class Clock:
    """A stopwatch with named spans. It starts when it is made; `launch` makes it before anything is built.

    Attributes:
        total_s: seconds in each span since the start. Time in a nested span counts in the inner span only.
        listeners: called with the name and the seconds of each span when it ends, and of the time between.
        watchers: called with the name of the span that begins, and again whenever it advances.
    """

    def __init__(self) -> None:
        self.total_s: dict[str, float] = defaultdict(float)
        self.listeners: list[Callable[[str, float], None]] = []
        self.watchers: list[Callable[[str], None]] = []
        self._inner_s: list[float] = []
        self._open: list[str] = []
        self._between_start: float | None = None
        self._lap_start = time.perf_counter()
        self._lap_s: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count the time spent inside under `name`, also when it ends by an exception."""
        start = time.perf_counter()
        if self._between_start is not None:
            self._notify(BETWEEN, start - self._between_start)
            self._between_start = None
        self.enter(name)
        self._open.append(name)
        self._inner_s.append(0.0)
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.total_s[name] += spent - self._inner_s.pop()
            if self._inner_s:
                self._inner_s[-1] += spent
            self._open.pop()
            self._notify(name, spent)
            if not self._open:
                self._between_start = start + spent
            self.enter(self._open[-1] if self._open else BETWEEN)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Count the time after this block as the end of the process, even if an exception ends the block."""
        try:
            yield
        finally:
            self.enter(END)

    def _notify(self, name: str, seconds: float) -> None:
        for listener in self.listeners:
            listener(name, seconds)

    def enter(self, name: str) -> None:
        """Tell watchers that an activity begins; a repeated call tells them that it advances."""
        for watcher in self.watchers:
            watcher(name)

    def lap(self) -> dict[str, float]:
        """Return the seconds since the last lap: of each span that took any, and of training (`training`)."""
        now = time.perf_counter()
        wall_s, self._lap_start = now - self._lap_start, now
        spans = {name: s - self._lap_s.get(name, 0.0) for name, s in self.total_s.items()}
        self._lap_s = dict(self.total_s)
        other_s = sum(s for name, s in spans.items() if name not in TRAINING)
        return {name: s for name, s in spans.items() if s > 0} | {"training": max(wall_s - other_s, 1e-9)}
