"""Console output that never ends a run: lines are lost if the disk is full or the reader is gone."""

import os
import select
import sys
from typing import TextIO


def open_closed() -> None:
    """Open the standard streams that this process lacks, as after `>&-`, on /dev/null.

    Otherwise the next file that is opened gets the number of the console, and console output goes into it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def emit(text: str, stream: TextIO) -> None:
    """Write and flush a text; if that fails, drop it and all later output."""
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
    """Flush both streams; if the interpreter failed to do so, it would replace the exit code with 120."""
    for stream in (sys.stdout, sys.stderr):
        emit("", stream)


def silence(fd: int) -> None:
    """Redirect a file descriptor to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)
