"""stdout and stderr of a run: a write returns at once, even if nobody reads the output."""

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
"""The most bytes that may wait for a reader; lines beyond them are dropped and counted."""

PIECE_BYTES = 1 << 16

PATIENCE_S = 5.0
"""At the end of a run, the queue gives up a reader that reads nothing for this long."""


class ConsoleQueue(io.RawIOBase):
    """A queue of bytes for a stream; a thread writes them to the stream.

    Only the thread waits for the reader. A process forked from this one has no such thread: there, writes go
    directly to the stream.

    Args:
        plain: the stream; nothing else may write to it meanwhile.
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
        """The file descriptor of the stream."""
        return self._fd

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Append bytes to the queue, or drop them if it is full; return the length of `data` either way."""
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
        """Wait until all is written or the reader stops reading; return whether all is written."""
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
        """Write all; if the reader is gone or the disk is full, drop this and all later output."""
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
    """Replace `sys.stdout` and `sys.stderr` by queues; restore the plain streams at the end.

    A plain stream whose reader still reads nothing is then redirected to /dev/null, so that nothing waits.
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
    """Return the error mode of the encoding: a letter that a console cannot show must not end a run."""
    return "backslashreplace" if stream.errors in (None, "strict") else stream.errors
