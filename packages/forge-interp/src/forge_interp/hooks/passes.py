"""Where a forward pass of a model begins and ends, for a capture that looks at whole passes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

from torch import nn


@dataclass(frozen=True, eq=False)
class Pass:
    """What is done at the passes of a model.

    Attributes:
        begin: called when a pass begins.
        end: called when a pass has ended, or was stopped.
        is_over: whether the rest of the pass is not wanted.
    """

    begin: Callable[[], None]
    end: Callable[[], None]
    is_over: Callable[[], bool]


class Stop(Exception):
    """Not an error: ends a forward pass early."""

    def __init__(self, of: Pass) -> None:
        super().__init__()
        self.of = of


class _Depth(threading.local):
    calls = 0


class _Forward:
    """Stands for `model.forward`: returns None where one of `passes` stops it.

    A copy of the model, also through a pickle, gets the forward that the model itself had.
    """

    def __init__(self, model: nn.Module) -> None:
        update_wrapper(self, model.forward)
        self.passes: list[Pass] = []
        self._model = model
        self._instance_forward = model.__dict__.get("forward")
        self._forward: Callable[..., Any] = model.forward
        self._depth = _Depth()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (
            (getattr, (self._model, "forward"))
            if self._instance_forward is None
            else (partial, (self._instance_forward,))
        )

    @property
    def is_running(self) -> bool:
        """Whether this thread is in a pass; a model that calls itself makes no second one."""
        return self._depth.calls > 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(one.is_over() for one in self.passes):
            return None
        self._depth.calls += 1
        try:
            return self._forward(*args, **kwargs)
        except Stop as stop:
            if self._depth.calls > 1 or all(stop.of is not one for one in self.passes):
                raise
            return None
        finally:
            self._depth.calls -= 1

    def forget(self, one: Pass) -> None:
        """After the last the model has its own forward again, unless something was put on top of this."""
        self.passes.remove(one)
        if self.passes or self._model.__dict__.get("forward") is not self:
            return
        if self._instance_forward is None:
            del self._model.forward
        else:
            self._model.forward = self._instance_forward


class _Ends:
    """Hooks that tell of the beginning and the end of each pass; those of a copy of the model tell nobody."""

    def __init__(self, forward: _Forward | None = None, one: Pass | None = None) -> None:
        self._forward = forward
        self._one = one

    def __reduce__(self) -> tuple[type[_Ends], tuple[()]]:
        return _Ends, ()

    def begin(self, module: nn.Module, args: tuple) -> None:
        if self._one is not None and self._forward is not None and not self._forward.is_running:
            self._one.begin()

    def end(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._one is not None and self._forward is not None and not self._forward.is_running:
            self._one.end()


@contextmanager
def passes_of(model: nn.Module, one: Pass) -> Iterator[Callable[[nn.Module], bool]]:
    """Tell `one` of the passes of a model, to which its taps are attached already.

    Yields:
        Whether a hook of a module runs inside a pass; hooks of the model itself do so before and after.
    """
    forward = model.__dict__.get("forward")
    if not isinstance(forward, _Forward):
        forward = model.forward = _Forward(model)
    ends = _Ends(forward, one)
    with ExitStack() as stack:
        forward.passes.append(one)
        stack.callback(forward.forget, one)
        stack.callback(model.register_forward_pre_hook(ends.begin, prepend=True).remove)
        stack.callback(model.register_forward_hook(ends.end).remove)
        yield lambda module: module is not model or forward.is_running
