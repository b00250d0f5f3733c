"""stdout and stderr of a run: a write returns at once, whoever reads it or does not."""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from forge_trainer.console import emit, silence

MOST_BYTES = 1 << 20
"""So much may wait for a reader; lines beyond it are dropped and counted."""

PIECE_BYTES = 1 << 16

PATIENCE_S = 5.0
"""At the end of a run, a reader that takes nothing for so long is given up."""


class ConsoleQueue(io.RawIOBase):
    """Bytes on their way to a stream; a thread writes them there.

    Only the thread ever waits for the reader. A process that was forked from this one has no such thread:
    there, writes go straight to the stream.

    Args:
        plain: the stream, which nothing else writes to meanwhile.
    """

    def __init__(self, plain: TextIO) -> None:
        self._fd, self._terminal, self._process = plain.fileno(), plain.isatty(), os.getpid()
        self._waiting: deque[bytes] = deque()
        self._bytes = self._dropped = self._moved = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._pass_on, name="queue", daemon=True).start()

    def writable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def isatty(self) -> bool:
        """See `io.RawIOBase`."""
        return self._terminal

    def fileno(self) -> int:
        """Of the stream."""
        return self._fd

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Put bytes behind those that wait, or drop them if too many do; returns how many were given."""
        piece = bytes(data)
        if os.getpid() != self._process:
            self._write(piece)
            return len(piece)
        with self._changed:
            if self._waiting and self._bytes + len(piece) > MOST_BYTES:
                self._dropped += max(1, piece.count(b"\n"))
            elif piece:
                self._say_dropped()
                self._put(piece)
        return len(piece)

    def drain(self) -> bool:
        """Wait until all is written, or for as long as the reader takes something; whether all is written."""
        with self._changed:
            self._say_dropped()
            while self._waiting:
                moved = self._moved
                if not self._changed.wait_for(lambda: self._moved != moved, PATIENCE_S):  # noqa: B023
                    return False
        return True

    def _say_dropped(self) -> None:
        if self._dropped:
            self._put(f"[{self._dropped} lines were dropped here: nobody read them]\n".encode())
            self._dropped = 0

    def _put(self, piece: bytes) -> None:
        self._waiting.append(piece)
        self._bytes += len(piece)
        self._changed.notify_all()

    def _pass_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                piece = self._waiting[0]  # it stays there until it is written, for `drain`
            self._write(piece)
            with self._changed:
                self._waiting.popleft()
                self._bytes -= len(piece)
                self._note_moved()

    def _note_moved(self) -> None:
        with self._changed:
            self._moved += 1
            self._changed.notify_all()

    def _write(self, piece: bytes) -> None:
        """Write all; where the reader is gone or the disk is full, this and what follows goes nowhere."""
        while piece:
            try:
                piece = piece[os.write(self._fd, piece[:PIECE_BYTES]) :]
            except BlockingIOError:  # somebody who shares the stream made it so
                select.select([], [self._fd], [])
            except OSError:
                return silence(self._fd)
            if os.getpid() == self._process:
                self._note_moved()
        return None


@contextmanager
def queued_console() -> Iterator[None]:
    """Let `sys.stdout` and `sys.stderr` be queues; at the end they are the plain streams again.

    A plain stream whose reader stands still even then goes nowhere, so that nothing can wait for it.
    """
    plain, made = (sys.stdout, sys.stderr), list[ConsoleQueue]()
    for stream in plain:
        emit("", stream)
        made.append(ConsoleQueue(stream))
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(queue, stream.encoding, _errors(stream), write_through=True)  # type: ignore[arg-type]
        for queue, stream in zip(made, plain, strict=True)
    )
    try:
        yield
    finally:
        for queue in made:
            if not queue.drain():
                silence(queue.fileno())
        sys.stdout, sys.stderr = plain


def _errors(stream: TextIO) -> str:
    """A letter that the encoding of a console does not know ends no run."""
    return "backslashreplace" if stream.errors in (None, "strict") else stream.errors
