"""Whether somebody asked this process to stop. Imports nothing heavy: a command does this first of all."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from forge_resilience.exit_codes import ExitCode
from forge_resilience.last_words import last_words
from forge_resilience.verdict import Verdict

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
"""Schedulers warn by TERM, USR1 or USR2; a person presses Ctrl-C, or their terminal goes away (HUP)."""

INTERRUPT_AFTER_S = 1.0
"""A second Ctrl-C at least this long after the first ends the process at once; launchers repeat faster."""

STUCK_S = 10.0
"""So long a start may take to end after a signal, before a thread ends the process."""


class Stopped(BaseException):
    """A signal came before there was anything to save.

    Not an `Exception`, so that code which retries or logs errors lets it through.
    """


class Signals:
    """Context manager that turns signals into a verdict at the next step boundary.

    Handlers only set a flag, so a save in progress is never cut short. Repeated signals are normal (SLURM
    sends TERM several times within 0.1 s) and change nothing; only a second Ctrl-C by a person does. Where
    SIGHUP is ignored already (`nohup`), it stays ignored.

    Must be entered by the main thread. Processes forked inside inherit the handlers, which do nothing there.

    Args:
        starting: nothing is worth saving yet. Until `loaded()`, a signal ends the process at once, because an
            exception while a C extension starts can crash it; from then until `started()` it raises
            `Stopped`.

    Attributes:
        received: the first signal that asked to stop, None before.
        starting: whether the start lasts.
    """

    def __init__(self, starting: bool = False) -> None:
        self.received: signal.Signals | None = None
        self.starting = starting
        self._raises = self._loads = starting
        self._interrupted_s: float | None = None
        self._process = os.getpid()
        self._previous: dict[signal.Signals, Any] = {}
        self._watch: _Watch | None = None

    def __enter__(self) -> Signals:
        self.install()
        return self

    def install(self) -> None:
        """Handle signals from now on; `__enter__` for a process that never gives its handlers back.

        Raises:
            Stopped: a signal comes at once.
        """
        for number in STOPPING:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        if self.starting:
            self._watch = _Watch()

    def __exit__(self, *_: object) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        self._end_watch()

    def loaded(self) -> None:
        """Note that all modules are loaded: from now on a signal during the start raises `Stopped`."""
        self._loads = False

    def started(self, agree: Callable[[Verdict], Verdict] = lambda verdict: verdict) -> None:
        """End the start: from now on a signal asks to stop after the current step. Collective as `agree` is.

        Args:
            agree: makes the verdicts of all ranks one.

        Raises:
            Stopped: a signal came during the start, here or on another rank.
        """
        self._raises = self._loads = False
        if agree(self.verdict()) >= Verdict.STOP:
            raise Stopped
        self.starting = False
        self._end_watch()

    def ignore(self) -> None:
        """Ignore all signals from now on, for good; the last thing that a command does.

        Python's own handlers go when the interpreter ends, up to seconds before the process does: a repeated
        TERM would then replace the exit code.
        """
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)
        self._previous.clear()
        self._watch = None  # it stays until the process is gone

    def verdict(self) -> Verdict:
        """Return STOP once a signal came."""
        return Verdict.CONTINUE if self.received is None else Verdict.STOP

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return
        first, self.received = self.received is None, self.received or signal.Signals(number)
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_s is not None and now - self._interrupted_s > INTERRUPT_AFTER_S:
                raise KeyboardInterrupt
            self._interrupted_s = self._interrupted_s or now
        if first and self._loads:
            last_words(stopped_by(self.received.name))
            os._exit(ExitCode.PREEMPTED)
        if first and self._raises:
            raise Stopped

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None


def stopped_by(cause: str) -> str:
    """Return the message of a start that was stopped."""
    return f"stopped by {cause} before the first step of this start; start it again\n"


class _Watch:
    """Ends a signalled process that does not end by itself, because its main thread waits in C++ code.

    Python runs handlers in the main thread only, between two of its instructions: not while it connects to
    another rank. A thread reads here the byte that the interpreter writes into a pipe at once.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        signal.set_wakeup_fd(-1)
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def _run(self) -> None:
        while not self._ended.is_set():
            if os.read(self._read, 1)[0] in STOPPING and not self._ended.wait(STUCK_S):
                last_words("asked to stop during the start, and ended by force: it did not react\n")
                os._exit(ExitCode.PREEMPTED)
