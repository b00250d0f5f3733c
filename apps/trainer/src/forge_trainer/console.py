"""Console output that never ends a run: lines are lost if the disk is full or the reader is gone."""

import os
import select
import sys
from typing import TextIO


def open_closed() -> None:
    """Open the streams that this process was started without, as with `>&-`: they lead nowhere.

    Else the next file that is opened would be taken for the console by whatever writes to its number.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def emit(text: str, stream: TextIO) -> None:
    """Write and flush; if that fails, this and all later output is dropped."""
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        silence(stream.fileno())


def has_reader(stream: TextIO) -> bool:
    """Whether the other end of a pipe is still open."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return not poll.poll(0)


def flush_both() -> None:
    """Flush both streams, so that the interpreter does not fail to and replace the exit code with 120."""
    for stream in (sys.stdout, sys.stderr):
        emit("", stream)


def silence(fd: int) -> None:
    """Redirect a file descriptor to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)
