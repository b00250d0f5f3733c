"""Whether somebody asked this process to stop."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

from forge_resilience.verdict import Verdict

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
"""Schedulers warn by TERM, USR1 or USR2; a person presses Ctrl-C."""

INTERRUPT_AFTER_S = 1.0
"""A second Ctrl-C at least this long after the first ends the process at once; schedulers repeat faster."""


class Signals:
    """Context manager that turns signals into a verdict at the next step boundary.

    Handlers only set a flag, so a save in progress is never cut short. Repeated signals are normal (SLURM
    sends TERM several times within 0.1 s) and change nothing; only a second Ctrl-C by a person does.

    Attributes:
        received: the first signal that asked to stop, None before.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._first_s = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        for number in STOPPING:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
            self._first_s = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._first_s > INTERRUPT_AFTER_S:
            raise KeyboardInterrupt

    def verdict(self) -> Verdict:
        """STOP once a signal came."""
        return Verdict.CONTINUE if self.received is None else Verdict.STOP
