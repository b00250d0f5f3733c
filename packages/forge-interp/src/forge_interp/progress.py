"""How far has a long loop come?"""

import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
_REDRAW_S = 0.1


def progress(
    iterable: Iterable[Item], total: int | None = None, label: str = "", enabled: bool = True
) -> Iterator[Item]:
    """Pass items through and draw a bar on standard error, if that is a terminal; a count without `total`."""
    if not enabled or sys.stderr is None or not sys.stderr.isatty():
        yield from iterable
        return
    start, drawn, done = time.monotonic(), 0.0, 0
    try:
        for item in iterable:
            yield item
            done += 1
            now = time.monotonic()
            if now - drawn >= _REDRAW_S:
                _draw(_line(label, done, total, now - start))
                drawn = now
    finally:
        _draw(_line(label, done, total, time.monotonic() - start) + "\n")


def _line(label: str, done: int, total: int | None, seconds: float) -> str:
    rate = done / seconds if seconds > 0 else 0.0
    if not total:
        return f"{label} {done} [{seconds:.0f} s, {rate:.3g}/s]"
    left = (total - done) / rate if rate > 0 else 0.0
    counts = f" {done}/{total} [{seconds:.0f} s, {left:.0f} s left]"
    width = max(10, min(40, shutil.get_terminal_size().columns - len(label) - len(counts) - 3))
    filled = min(width, width * done // total)
    return f"{label} {'#' * filled}{'.' * (width - filled)}{counts}"


def _draw(line: str) -> None:
    sys.stderr.write("\r\x1b[K" + line)
    sys.stderr.flush()
