"""How a place in a configuration is written: `data.sources[0].path`, odd names quoted as in TOML."""

from __future__ import annotations

import json
import re

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_LAST = re.compile(r"""(?:^|\.)(?:"(?:[^"\\]|\\.)*"|[^."\[\]]*)$|\[\d+\]$""")


def join(key: str, name: str) -> str:
    """The key of the entry `name` of the table `key`."""
    written = (
        name if _BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f")
    )
    return f"{key}.{written}" if key else written


def item(key: str, index: int) -> str:
    """The key of one item of the array `key`."""
    return f"{key}[{index}]"


def parent(key: str) -> str:
    """The key of the table or array that holds `key`; empty at the top."""
    return _LAST.sub("", key, count=1)


def inside(key: str, table: str) -> bool:
    """Whether `key` lies below `table`."""
    return key.startswith((f"{table}.", f"{table}["))
