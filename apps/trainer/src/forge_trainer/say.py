"""What is told to a person is never worth a run: it is lost when the disk is full or the reader is gone."""

import os
import select
import sys
from typing import TextIO


def say(text: str, stream: TextIO) -> None:
    """Write and flush; where that fails, this and what follows goes nowhere."""
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        _silence(stream)


def has_reader(stream: TextIO) -> bool:
    """Whether somebody may still read what is written."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return not poll.poll(0)


def settle() -> None:
    """Flush both streams, so that the interpreter does not fail to and replace the exit code with 120."""
    for stream in (sys.stdout, sys.stderr):
        say("", stream)


def _silence(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
