"""The message of a process that is ended by force. Imports nothing heavy."""

import os
import select
from contextlib import suppress

MOST_BYTES = select.PIPE_BUF
"""A pipe that is ready takes so many bytes at once."""


def last_words(text: str) -> None:
    """Write to stderr if it accepts the text at once; a reader that does not read never delays the end."""
    with suppress(OSError):
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if poll.poll(0):
            os.write(2, text.encode(errors="backslashreplace")[:MOST_BYTES])
