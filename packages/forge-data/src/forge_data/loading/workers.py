"""Processes that prepare items ahead, and that never outlive or hold up the process they prepare them for.

A worker writes its groups of items into a pipe: the pipe bounds how far ahead it is, its end tells the reader
that the worker died, and tells the worker that the reader did. It is a fresh interpreter without torch, no
fork of a process with threads and a device.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import IO, cast

from forge_data.error import DataError
from forge_data.job_signals import blocked
from forge_data.loading.batches import Batches, Group

PIPE_BYTES = 1 << 20
"""What the pipe of a worker holds, where the system allows it."""

_CODE = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from forge_data.loading.workers import serve; serve()"
)

Process = subprocess.Popen[bytes]


class Workers(Iterator[Group]):
    """The groups of an endless stream in order; worker processes take turns.

    Args:
        batches: makes the groups.
        count: number of processes, at least one.
    """

    def __init__(self, batches: Batches, count: int) -> None:
        self.processes = [_start() for _ in range(count)]
        self.close = weakref.finalize(self, _end, self.processes)
        """Ends the processes, at the latest at the end of this one."""
        for number, process in enumerate(self.processes):
            _send(process, sys.path, (batches, number, count))
        self._turns = itertools.cycle(self.processes)

    def require_alive(self) -> None:
        """Notice at once that a worker died: pipes hold prepared groups, perhaps for minutes.

        Raises:
            RuntimeError: one did.
        """
        if died := next((p for p in self.processes if p.poll()), None):
            raise RuntimeError(_how_it_ended(died))

    def __next__(self) -> Group:
        """Return the next group.

        Raises:
            DataError: the data of a worker are damaged, or no longer there.
            RuntimeError: a worker died.
        """
        self.require_alive()
        process = next(self._turns)
        try:
            found = pickle.load(cast(IO[bytes], process.stdout))
        except (EOFError, pickle.UnpicklingError):
            raise RuntimeError(_how_it_ended(process)) from None
        if isinstance(found, DataError):
            raise found
        return found


def _start() -> Process:
    """A worker that waits for its orders. Signals of the job are blocked in it from its first moment."""
    with blocked():
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(cast(IO[bytes], process.stdout), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return process


def _send(process: Process, *orders: object) -> None:
    """Send the orders; a dead worker is noticed when its first item is asked for."""
    pipe = cast(IO[bytes], process.stdin)
    with contextlib.suppress(BrokenPipeError), pipe:
        for order in orders:
            pickle.dump(order, pipe)


def _end(processes: list[Process]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        cast(IO[bytes], process.stdout).close()


def _how_it_ended(process: Process) -> str:
    code = process.wait(timeout=5)
    if code < 0:
        name = signal.Signals(-code).name
        reason = (
            "a file that it read became shorter, or its disk failed"
            if name == "SIGBUS"
            else "perhaps for want of memory, of which fewer data.workers need less"
        )
        return (
            f"a process that prepares batches ({process.pid}) was killed by {name}: {reason}; the same "
            "command continues from the last checkpoint"
        )
    return f"a process that prepares batches ({process.pid}) ended with code {code}; its error is said above"


def serve() -> None:
    """The main function of a worker: write groups to its standard output until nobody reads them."""
    # nothing else may write into the pipe
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        batches, first, step = cast(tuple[Batches, int, int], pickle.load(sys.stdin.buffer))
        for index in itertools.count(first, step):
            pickle.dump(batches.group(index), out, protocol=pickle.HIGHEST_PROTOCOL)
            out.flush()
    except DataError as error:
        pickle.dump(error, out)
        out.flush()
