"""How one process makes what several need, while the others wait."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, what: str) -> Iterator[bool]:
    """One process at a time, told True. On file systems without locks all do the work, told False.

    Args:
        path: the file that is locked.
        what: is being done, for the message of those that wait, e.g. `the text is tokenized`.
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
