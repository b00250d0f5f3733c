"""Signals of a job that its helper processes must not receive."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

STEP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers and terminals send to all processes of a job; the training process decides what happens."""


@contextmanager
def blocked() -> Iterator[None]:
    """Processes that are started in this context never receive them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STEP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
