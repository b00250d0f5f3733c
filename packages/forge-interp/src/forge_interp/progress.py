"""How far has a long loop come?"""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def progress(
    iterable: Iterable[Item], total: int | None = None, label: str = "", enabled: bool = True
) -> Iterator[Item]:
    """Pass items through; tqdm, if it is installed, draws a bar on standard error, if that is a terminal."""
    try:
        from tqdm import tqdm
    except ImportError:
        return iter(iterable)
    if not enabled or sys.stderr is None or not sys.stderr.isatty():
        return iter(iterable)
    return iter(tqdm(iterable, label, total))
