"""Locks: one process prepares shared files while the others wait."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def held_alone(path: Path) -> IO[str] | None:
    """Take a lock that `release` removes with its file; None where another process holds it.

    Args:
        path: the file to lock; made where there is none.
    """
    while True:
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
        except FileNotFoundError:
            pass
        except OSError:
            file.close()
            return None
        file.close()  # its holder has removed it meanwhile


def release(path: Path, lock: IO[str]) -> None:
    """Give up a lock of `held_alone`."""
    path.unlink(missing_ok=True)
    lock.close()


@contextmanager
def locked(path: Path, what: str) -> Iterator[bool]:
    """Let one process in at a time; yields whether the lock holds. Without file locks all enter, with False.

    Args:
        path: the file to lock.
        what: what happens inside, for the message of waiting processes, e.g. `the text is tokenized`.
    """
    with path.open("w") as file:
        alone = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write(f"waiting: {what} by another process\n")
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                alone = False
        except OSError:
            alone = False
        yield alone
