"""The activity of a rank, in a few bytes that another process reads. Imports nothing heavy."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass

_LAYOUT = struct.Struct("<QdddQQ32s")
_ODD = "<Q"


@dataclass(frozen=True)
class Heartbeat:
    """A snapshot of a rank.

    Attributes:
        since_s: start of the phase, on the monotonic clock.
        limit_s: limit of the phase.
        alive_s: when Python last ran there, on the monotonic clock.
        batches: number of times the rank has begun to wait for data.
        steps: number of steps the rank has begun.
        phase: name of the phase.
    """

    since_s: float
    limit_s: float
    alive_s: float
    batches: int
    steps: int
    phase: str


class HeartbeatFile:
    """The bytes, shared with the process that watches.

    Args:
        path: an existing file to read; None makes a new one, in memory where there is /dev/shm.
    """

    def __init__(self, path: str | None = None) -> None:
        if path is None:
            folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            handle, path = tempfile.mkstemp(prefix="forge-beat-", dir=folder)
            os.ftruncate(handle, _LAYOUT.size)
        else:
            handle = os.open(path, os.O_RDWR)
        self.path = path
        self._bytes = mmap.mmap(handle, _LAYOUT.size)
        os.close(handle)
        self._count = 0

    def write(self, beat: Heartbeat) -> None:
        """Replace the last heartbeat; called by one thread at a time."""
        self._count += 1
        self._bytes[8:] = _LAYOUT.pack(0, *_values(beat))[8:]
        self._bytes[:8] = struct.pack(_ODD, self._count)

    def read(self) -> Heartbeat | None:
        """Return the last heartbeat; None before the first. A read during a write is repeated."""
        for _ in range(100):
            raw = bytes(self._bytes)
            if raw == bytes(self._bytes):
                break
            time.sleep(0.0001)
        count, since, limit, alive, batches, steps, phase = _LAYOUT.unpack(raw)
        return Heartbeat(since, limit, alive, batches, steps, phase.rstrip(b"\0").decode()) if count else None

    def remove(self) -> None:
        """Remove the file from the disk, if it is still there: the rank and its monitor both do."""
        with suppress(FileNotFoundError):
            os.unlink(self.path)


def _values(beat: Heartbeat) -> tuple[float | int | bytes, ...]:
    name = beat.phase.encode()[:32]
    return beat.since_s, beat.limit_s, beat.alive_s, beat.batches, beat.steps, name
