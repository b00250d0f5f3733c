"""Numbers of a device that the host must know: read once, also where a forward pass is computed again.

To read waits for the device. What activation checkpointing computes again gives the same numbers again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

_pass: ContextVar[_Pass | None] = ContextVar("_pass", default=None)


class _Pass:
    """A forward pass, the first one or one of those that repeat it: each reads in the same order.

    Args:
        read: by the first one.
    """

    def __init__(self, read: list[Any]) -> None:
        self._read, self._place = read, 0

    def read(self, tensor: Tensor) -> Any:
        if self._place == len(self._read):
            self._read.append(tensor.tolist())
        self._place += 1
        return self._read[self._place - 1]


@contextmanager
def _of(read: list[Any]) -> Iterator[None]:
    token = _pass.set(_Pass(read))
    try:
        yield
    finally:
        _pass.reset(token)


def repeatable(forward: Callable[..., Any]) -> Callable[..., Any]:
    """One forward pass that may be called again with the same inputs, and then reads nothing of the device.

    Args:
        forward: reads by `numbers_of`. What it gives may depend on its inputs only.
    """
    read: list[Any] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        with _of(read):
            return forward(*args, **kwargs)

    return run


def numbers_of(tensor: Tensor) -> Any:
    """The numbers of a tensor, as lists; in a pass that is repeated those that the first one has read."""
    now = _pass.get()
    return tensor.tolist() if now is None else now.read(tensor)
