"""Device numbers that the host must know: read once, also where a forward pass is recomputed.

Each read waits for the device, and activation checkpointing recomputes the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

_pass: ContextVar[_Pass | None] = ContextVar("_pass", default=None)


class _Pass:
    """A forward pass or a repetition of it: each reads in the same order.

    Args:
        read: the numbers that the first pass read.
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
    """Make a forward pass that reads nothing from the device when it is repeated with the same inputs.

    Args:
        forward: reads by `numbers_of`. Its result must depend on its inputs only.
    """
    read: list[Any] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        with _of(read):
            return forward(*args, **kwargs)

    return run


def numbers_of(tensor: Tensor) -> Any:
    """Return the numbers of a tensor, as lists; in a repeated pass, those that the first pass read."""
    now = _pass.get()
    return tensor.tolist() if now is None else now.read(tensor)
