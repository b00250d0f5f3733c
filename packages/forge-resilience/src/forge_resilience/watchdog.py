"""Ends a run that hangs, and reports which rank on which host does what. Imports no torch."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from forge_resilience.exit_codes import ExitCode
from forge_resilience.finding import Finding
from forge_resilience.heartbeat import Heartbeat, HeartbeatFile

log = logging.getLogger(__name__)

FACTOR = 10.0
"""A phase may take so many times as long as the longest of the last ones."""

LAST = 50
"""So many phases of a kind are remembered: a first step that compiles counts for a while, not for good."""

ALIVE_S = 0.5


class Watchdog:
    """Context manager: a process beside this one watches that no phase takes too long.

    Limits are learnt: ten times the longest of the last phases of that name, but at least `least_s`; the
    first phase of a name may take `first_s`, because it may compile, or load. A process that is stopped
    (SIGSTOP) for `least_s` hangs in any phase.

    Args:
        folder: the folder of the reports; reports of an earlier hang there are moved away.
        rank: rank of this process.
        ranks: number of ranks.
        least_s: shortest time after which a phase hangs.
        first_s: limit of the first phase of a name.
        record: returns a record of the collectives to keep beside the stacks, if any; called after a hang.
        ended: called with the finding before the process ends.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        ranks: int,
        least_s: float,
        first_s: float,
        record: Callable[[], bytes | None] = lambda: None,
        ended: Callable[[Finding], None] = lambda finding: None,
    ) -> None:
        self._folder, self._rank, self._ranks = folder, rank, ranks
        self._least_s, self._first_s = least_s, max(least_s, first_s)
        self._record, self._ended = record, ended
        self._recent: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=LAST))
        self._beat = Heartbeat(time.monotonic(), 0.0, time.monotonic(), 0, 0, "")
        self._lock = threading.Lock()
        self._done = threading.Event()

    def __enter__(self) -> Watchdog:
        if self._rank == 0:
            _keep_last(self._folder)
        self._file = HeartbeatFile()
        self._stacks = tempfile.NamedTemporaryFile("w", prefix="forge-stacks-")
        faulthandler.register(signal.SIGQUIT, self._stacks.file, all_threads=True)
        self._monitor = self._start_monitor()
        self._thread = threading.Thread(target=self._live, name="watchdog", daemon=True)
        self._thread.start()
        self._listener = threading.Thread(target=self._obey, name="watchdog", daemon=True)
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._monitor.stdin.close()  # type: ignore[union-attr]
        self._monitor.wait()
        self._listener.join()
        self._monitor.stdout.close()  # type: ignore[union-attr]
        faulthandler.unregister(signal.SIGQUIT)
        self._stacks.close()
        self._file.remove()

    def enter(self, phase: str) -> None:
        """Note that this process begins another phase.

        Args:
            phase: its name; "data" is waiting for a batch, "step" training on it.
        """
        with self._lock:
            self._beat = replace(
                self._beat,
                phase=phase,
                since_s=time.monotonic(),
                limit_s=self._limit_s(phase),
                batches=self._beat.batches + (phase == "data"),
                steps=self._beat.steps + (phase == "step"),
            )
            self._file.write(self._beat)

    def learn(self, phase: str, seconds: float) -> None:
        """Note the duration of a phase that has ended."""
        self._recent[phase].append(seconds)

    def _limit_s(self, phase: str) -> float:
        recent = self._recent.get(phase)
        return max(self._least_s, FACTOR * max(recent)) if recent else self._first_s

    def _live(self) -> None:
        """Show the monitor that Python runs."""
        while not self._done.wait(ALIVE_S):
            with self._lock:
                self._beat = replace(self._beat, alive_s=time.monotonic())
                self._file.write(self._beat)

    def _start_monitor(self) -> subprocess.Popen[bytes]:
        settings = {
            "path": self._file.path,
            "stacks": self._stacks.name,
            "pid": os.getpid(),
            "rank": self._rank,
            "ranks": self._ranks,
            "host": socket.gethostname(),
            "folder": str(self._folder.absolute()),
            "least_s": self._least_s,
        }
        line = [sys.executable, "-m", "forge_resilience.monitor", json.dumps(settings)]
        pipe = subprocess.PIPE
        return subprocess.Popen(line, stdin=pipe, stdout=pipe, start_new_session=True)

    def _obey(self) -> None:
        """End the process when the monitor asks for it."""
        line = self._monitor.stdout.readline().decode().strip()  # type: ignore[union-attr]
        if not line:
            if not self._done.is_set():
                log.warning("rank %d: the process that watches it was killed: no hang is found", self._rank)
            return
        if record := self._record():
            (self._folder / f"collectives-{self._rank}.json").write_bytes(record)
        found = json.loads(line)
        self._ended(Finding(found["why"], tuple(found["hosts"])))
        os._exit(ExitCode.HUNG)


def _keep_last(folder: Path) -> None:
    """Move the reports of an earlier hang away; only the last are kept."""
    before = folder.with_name(f"{folder.name}-before")
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
