"""How taps are attached to the modules of a model, and in which order they have their turns.

All taps on a module share one set of hooks, held by a board, so that the order is the same whoever came
first: captures that want the value before edits, then edits, then all other captures.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forge_interp.errors import InterpError
from forge_interp.hooks import values
from forge_interp.hooks.interception import Interception
from forge_interp.hooks.running import Running
from forge_interp.hooks.sites import Site
from forge_interp.hooks.taps import Tap, show
from forge_interp.hooks.torch_private import is_frame_compiled


class _Board:
    """The taps of one module and the hooks that serve them.

    A copy of a module takes copies of its hooks along, also through a pickle: those lead to an empty board.

    Attributes:
        taps: all, in their order.
        on_module: those that are shown calls of the module.
        on_attention: those that are shown calls of attention.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._arrange([])

    def __reduce__(self) -> tuple[type[_Board], tuple[()]]:
        return _Board, ()

    @property
    def edits(self) -> list[tuple[Site, Callable[[Tensor], Tensor]]]:
        """The edits of the module, in their order."""
        return [(tap.site, tap.edit) for tap in self.taps if tap.edit is not None]

    def hang(self, module: nn.Module) -> None:
        """Have the module call it.

        Raises:
            InterpError: it cannot, for it is TorchScript.
        """
        if isinstance(module, torch.jit.ScriptModule):
            raise InterpError(
                f"{type(module).__name__} is TorchScript, whose modules call no hooks; give the model that "
                "was scripted, or name a module around it"
            )
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after),
            module.register_forward_hook(self._left, always_call=True),
        ]

    def add(self, tap: Tap) -> None:
        self._arrange([*self.taps, tap])

    def remove(self, tap: Tap) -> bool:
        """Whether that was the last one; the hooks are gone then."""
        self._arrange([t for t in self.taps if t is not tap])
        if not self.taps:
            _RUNNING.forget(self)
            for handle in self._handles:
                handle.remove()
        return not self.taps

    def _arrange(self, taps: list[Tap]) -> None:
        self.taps = sorted(taps, key=lambda t: t.phase)
        self.on_attention = [tap for tap in self.taps if tap.is_on_attention]
        self.on_module = [tap for tap in self.taps if not tap.is_on_attention]
        self._on_output = [tap for tap in self.on_module if tap.site.part == "out"]
        self._on_input = [tap for tap in self.on_module if tap.site.part != "out"]

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if not self.taps:
            return None
        _EAGERLY.check()
        numbers = _RUNNING.enter(self)
        if not self._on_input:
            return None
        call: dict[str, Any] = {"args": args, "kwargs": kwargs}
        for tap in self._on_input:
            if tap.wants(numbers[tap]):
                find = partial(values.argument, module, call["args"], call["kwargs"], tap.site)
                call = show(tap, numbers[tap], call, find)
        changed = call["args"] is not args or call["kwargs"] is not kwargs
        return (call["args"], call["kwargs"]) if changed else None

    def _after(self, module: nn.Module, args: tuple, output: Any) -> Any:
        value = output
        for tap in self._on_output:
            number = _RUNNING.number(self, tap)
            if tap.wants(number):
                value = show(tap, number, value, lambda tap=tap: tap.site.path)
        return None if value is output else value

    def _left(self, module: nn.Module, args: tuple, output: Any) -> None:
        if missed := _RUNNING.leave(self):
            _refuse_backward(missed[0], output)


def _refuse_backward(tap: Tap, output: Any) -> None:
    """A backward pass through this output would recompute attention without an edit that was made."""

    def refuse(gradient: Tensor) -> None:
        raise InterpError(
            f"edit of {str(tap.site)!r}: activation checkpointing (or no_grad) is inside that module: "
            "the edit is not made again when attention is recomputed; name the module inside that is "
            "checkpointed, or switch checkpointing off"
        )

    for value in values.tensors(output):
        if value.requires_grad:
            value.register_hook(refuse)


# Hooks are state of modules that several contexts share, and their order must be agreed: so the boards are
# shared, found by the id of the module, which their taps keep alive. Which calls are running is up to the
# thread.
_BOARDS: dict[int, _Board] = {}
_RUNNING = Running()
_LOCK = threading.RLock()


@contextmanager
def attached(taps: Sequence[Tap]) -> Iterator[None]:
    """Attach taps for the time of a `with`; compiled models run eagerly then, or hooks were passed over."""
    with ExitStack() as stack:
        for tap in taps:
            _attach(tap)
            stack.callback(_detach, tap)
        if any(tap.is_on_attention for tap in taps):
            stack.enter_context(Interception(_RUNNING.attend))
        stack.enter_context(_EAGERLY)
        yield


def _attach(tap: Tap) -> None:
    with _LOCK:
        board = _BOARDS.get(id(tap.module))
        if board is None:
            board = _Board()
            board.hang(tap.module)
            _BOARDS[id(tap.module)] = board
        board.add(tap)


def _detach(tap: Tap) -> None:
    with _LOCK:
        if _BOARDS[id(tap.module)].remove(tap):
            del _BOARDS[id(tap.module)]


class _Eagerly:
    """While any `with` of it is open no compiled code runs; then, what was allowed before is allowed again.

    Before the compiler is loaded, nothing is compiled: it is not loaded for this.
    """

    def __init__(self) -> None:
        self._num_open = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with _LOCK:
            if self._is_compiler_free:
                self._stance = torch.compiler.set_stance("force_eager")
            self._num_open += 1

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        is_refused = self._is_compiler_free and isinstance(
            error, sys.modules["torch._dynamo"].exc.TorchDynamoException
        )
        with _LOCK:
            self._num_open -= 1
            if self._num_open == 0 and self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None
        if is_refused:
            raise _compiled_inside() from error

    def check(self) -> None:
        """A module is called: refuse it in code that is being compiled."""
        if self._is_compiler_free and (torch.compiler.is_compiling() or is_frame_compiled()):
            raise _compiled_inside()

    @property
    def _is_compiler_free(self) -> bool:
        """Whether the compiler is there and may compile, as it was loaded inside the `with`."""
        return self._stance is None and "torch._dynamo" in sys.modules


def _compiled_inside() -> InterpError:
    return InterpError(
        "a model is compiled inside the with, where hooks would become a part of it; expected torch.compile "
        "before the with begins: the model runs eagerly inside, and as compiled afterwards"
    )


_EAGERLY = _Eagerly()
