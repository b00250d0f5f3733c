"""Where does a forward pass of a model begin and end, for a capture of complete passes?"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

from torch import nn

from forge_interp.hooks.engine.torch_private import call_name


class Stop(Exception):
    """Ends a forward pass early; it is no error."""

    def __init__(self, of: object) -> None:
        super().__init__()
        self.of = of


class _Call:
    """Stands for a function of a model; a copy of the model, also by pickle, gets the original function."""

    def __init__(self, model: nn.Module, name: str, run: Callable[..., Any]) -> None:
        update_wrapper(self, getattr(model, name))
        self.run: Callable[..., Any] | None = run
        self.before = vars(model).get(name)
        self._model, self._name = model, name
        self._call = getattr(model, name)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (getattr, (self._model, self._name)) if self.before is None else (partial, (self.before,))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs) if self.run is None else self.run(self._call, *args, **kwargs)


class _Passes(threading.local):
    """Depth of a model's nested calls on this thread; a model that calls itself begins no second pass."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.depth = 0

    def forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the forward of the model; None where the owner stops it."""
        if self.owner.is_over():
            return None
        self.depth += 1
        try:
            return call(*args, **kwargs)
        except Stop as stop:
            if self.depth > 1 or stop.of is not self.owner:
                raise
            return None
        finally:
            self.depth -= 1

    def whole(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model with all hooks, as one pass."""
        if self.depth:
            return call(*args, **kwargs)
        self.owner.begin_pass()
        output = call(*args, **kwargs)
        self.owner.end_pass()
        return output


@contextmanager
def passes_of(model: nn.Module, owner: Any) -> Iterator[Callable[[nn.Module], bool]]:
    """Report a model's passes to `owner`, by `begin_pass` and `end_pass`; `is_over` ends a pass early.

    Yields a function: does a hook of a module run inside a pass? Hooks of the model run before and after.
    """
    passes = _Passes(owner)
    runs = {"forward": passes.forward, call_name(model): passes.whole}
    calls = {name: _Call(model, name, run) for name, run in runs.items()}
    vars(model).update(calls)
    try:
        yield lambda module: module is not model or passes.depth > 0
    finally:
        for name, call in calls.items():
            call.run = None
            if vars(model).get(name) is call:  # else something was put on top of it, and calls it
                before = call.before
                while isinstance(before, _Call) and before.run is None:
                    before = before.before
                vars(model).pop(name)
                vars(model).update({} if before is None else {name: before})
