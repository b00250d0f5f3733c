"""How are taps attached to the modules of a model, and which module calls is a thread in?

All taps on a module share one set of hooks, held by a board, so that the order does not depend on which tap
came first: captures that want the value before edits, then edits, then all other captures.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forge_interp.attention.flex import FLEX
from forge_interp.attention.lineage import Lineage
from forge_interp.errors import InterpError
from forge_interp.hooks.engine import values
from forge_interp.hooks.engine.attend import Interception, is_intercepted, serve
from forge_interp.hooks.engine.taps import Phase, Tap
from forge_interp.hooks.engine.torch_private import (
    is_frame_compiled,
    order_hooks,
    recorders,
    saved_tensors_hooks,
)
from forge_interp.hooks.sites import Site

_COMPILED_INSIDE = (
    "a model is compiled inside the with, where hooks would become a part of it; expected torch.compile "
    "before the with begins: the model runs eagerly inside, and as compiled afterwards"
)


class _Board:
    """The taps of one module, in their order, and the hooks that serve them.

    A copy of a module, also through a pickle, has copies of its hooks: they lead to an empty board.
    """

    def __init__(self) -> None:
        self.taps: list[Tap] = []
        self._handles: list[Any] = []
        self._module: nn.Module | None = None
        self._order: list[int] = []  # of the other hooks of the module

    def __reduce__(self) -> tuple[type[_Board], tuple[()]]:
        return _Board, ()

    @property
    def on_module(self) -> list[Tap]:
        """The taps on inputs and outputs of module calls."""
        return [tap for tap in self.taps if not tap.is_on_attention]

    def hang(self, module: nn.Module) -> None:
        """Register the hooks on a module; InterpError for TorchScript, which calls no hooks."""
        if isinstance(module, torch.jit.ScriptModule):
            raise InterpError(
                f"{type(module).__name__} is TorchScript, whose modules call no hooks; give the model that "
                "was scripted, or name a module around it"
            )
        self._module, self._order = module, list(module._forward_hooks)
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after),
            module.register_forward_hook(self._left, always_call=True),
        ]
        recording = recorders(module)  # what a model writes down of a value is what it goes on with
        order_hooks(module, [number for number in module._forward_hooks if number not in recording])

    def take_down(self) -> None:
        """Remove the hooks from the module, even while it runs."""
        while _RUNNING.innermost(self) is not None:
            _RUNNING.leave(self)
        for handle in self._handles:
            handle.remove()
        if self._module is not None:
            order_hooks(self._module, self._order)
            self._module = None

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if not self.taps:
            return None
        _EAGERLY.check()
        _RUNNING.enter(self)
        call: dict[str, Any] = {"args": args, "kwargs": kwargs}
        for tap in self.on_module:
            if tap.site.part != "out":
                find = partial(values.argument, module, call["args"], call["kwargs"], tap.site)
                call = tap.replaced_in(_RUNNING.number(self, tap), call, find)
        changed = call["args"] is not args or call["kwargs"] is not kwargs
        return (call["args"], call["kwargs"]) if changed else None

    def _after(self, module: nn.Module, args: tuple, output: Any) -> Any:
        _RUNNING.check_complete(self, output)
        value = output
        for tap in self.on_module:
            if tap.site.part == "out":
                value = tap.replaced_in(_RUNNING.number(self, tap), value, lambda tap=tap: tap.site.path)
        return None if value is output else value

    def _left(self, module: nn.Module, args: tuple, output: Any) -> None:
        if missed := _RUNNING.leave(self):
            for value in (values.read(output, path, Site("")) for path in values.tensor_paths(output)):
                if value.requires_grad:
                    value.register_hook(partial(_refuse_backward, missed[0]))


def _refuse_backward(tap: Tap, gradient: Tensor) -> None:
    """Refuse a backward pass that would recompute attention without an edit."""
    raise InterpError(
        f"edit of {str(tap.site)!r}: activation checkpointing (or no_grad) is inside that module: the edit "
        "is not made again when attention is recomputed; name the module inside that is checkpointed, or "
        "switch checkpointing off"
    )


@dataclass(eq=False)
class _Call:
    """A module call that has not ended."""

    board: _Board
    numbers: dict[Tap, int | None]  # of this call, as each tap on the module itself counts
    graph: Any = None  # whether it is in a checkpointed part, see `_part_of_graph`
    interception: Interception | None = None  # of attention, for the time of this call
    missed: list[Tap] = field(default_factory=list)  # edits in a checkpointed part inside, which runs again
    outputs: list[tuple[int, int]] = field(default_factory=list)  # of attention: width of all heads, numbers


class _Running(threading.local):
    """The module calls that a thread is in, innermost last."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._is_busy = False

    def enter(self, board: _Board) -> None:
        """Enter a module call; number it for each tap on the module.

        In a backward pass and on other threads the `with` does not intercept.
        """
        with _LOCK:  # or two threads could number one call differently for two taps
            call = _Call(board, {tap: tap.begin() for tap in board.on_module})
        if len(call.numbers) < len(board.taps):
            call.graph = _part_of_graph()
            if not is_intercepted():
                call.interception = Interception(self.attend)
                call.interception.__enter__()
        self._calls.append(call)

    def innermost(self, board: _Board) -> _Call | None:
        """Return the innermost call of a module."""
        return next((call for call in reversed(self._calls) if call.board is board), None)

    def number(self, board: _Board, tap: Tap) -> int | None:
        """Return the number of a module's innermost call; a tap attached during the call begins here."""
        call = self.innermost(board)
        if call is None:
            return tap.begin()
        if tap not in call.numbers:
            call.numbers[tap] = tap.begin()
        return call.numbers[tap]

    def leave(self, board: _Board) -> list[Tap]:
        """Leave a module call, and the calls inside it that an exception ended.

        Returns edits of attention that a recomputation would miss.
        """
        of_board = self.innermost(board)
        call = None
        while of_board is not None and call is not of_board:
            call = self._calls.pop()
            if call.interception is not None:
                call.interception.__exit__(None, None, None)
        return [] if call is None else call.missed

    def attend(
        self, attention: Callable[..., Tensor], args: tuple, kwargs: dict[str, Any], lineage: Lineage
    ) -> Tensor:
        """Run one attention call through the taps; a nested call, for an outer `with`, passes unchanged."""
        taps = [] if self._is_busy else self._listeners()
        if not taps:
            return attention(*args, **kwargs)
        self._is_busy = True
        try:
            call = serve(taps, attention, args, kwargs, lineage)
            for running in self._calls:
                if any(tap in taps for tap in running.board.taps):
                    running.outputs.append((call.grid[1] * call.output.shape[-1], call.output.numel()))
            return call.returned
        finally:
            self._is_busy = False

    def check_complete(self, board: _Board, output: Any) -> None:
        """Raise InterpError where attention made only a part of an output that is as wide as its heads."""
        call, paths = self.innermost(board), values.tensor_paths(output)
        outputs = [] if call is None else call.outputs
        if not outputs or not paths:
            return
        value, seen = values.read(output, paths[0], Site("")), sum(numel for _, numel in outputs)
        if value.shape[-1:] == outputs[0][:1] and seen < value.numel():
            raise InterpError(
                f"attention is computed in pieces: {seen} of {value.numel()} numbers in the output of the "
                "module are softmax(scores) V as it can be seen; expected all: for a Hugging Face model that "
                "has it choose full attention (BigBird: attention_type='original_full'), or capture :out"
            )

    def _listeners(self) -> list[Tap]:
        """Return the taps of each owner's innermost running module."""
        found: list[Tap] = []
        here = _part_of_graph()
        for call in reversed(self._calls):
            served = {id(tap.owner) for tap in found}
            new = [tap for tap in call.board.taps if tap.is_on_attention and id(tap.owner) not in served]
            call.missed += [tap for tap in new if call.graph != here and tap.phase is Phase.EDIT]
            found += new
        return found


def _part_of_graph() -> tuple[bool, Any]:
    """Return a value that differs between the inside and the outside of a checkpointed part."""
    return torch.is_grad_enabled(), saved_tensors_hooks()


# Hooks are state of modules that several contexts share, and their order must be agreed: so the boards are
# shared, found by the id of the module, which their taps keep alive. Which calls are running is up to the
# thread.
_BOARDS: dict[int, _Board] = {}
_RUNNING = _Running()
_LOCK = threading.RLock()


@contextmanager
def attached(taps: Sequence[Tap]) -> Iterator[None]:
    """Attach taps for the time of a `with`; compiled models run eagerly inside, so that hooks are called."""
    with ExitStack() as stack:
        for tap in taps:
            with _LOCK:
                board = _BOARDS.get(id(tap.module)) or _Board()
                if not board.taps:
                    board.hang(tap.module)
                    _BOARDS[id(tap.module)] = board
                board.taps = sorted([*board.taps, tap], key=lambda t: t.phase)
            stack.callback(_detach, tap)
        if any(tap.is_on_attention for tap in taps):
            stack.enter_context(Interception(_RUNNING.attend))
        stack.enter_context(_EAGERLY)
        yield


def _detach(tap: Tap) -> None:
    with _LOCK:
        board = _BOARDS[id(tap.module)]
        board.taps = [t for t in board.taps if t is not tap]
        if not board.taps:
            board.take_down()
            del _BOARDS[id(tap.module)]


class _Eagerly:
    """While any of its `with` blocks is open, no compiled code runs; afterwards the earlier stance returns.

    It does not load the compiler, without which nothing is compiled.
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
            raise InterpError(_COMPILED_INSIDE) from error

    def check(self) -> None:
        """Refuse a module call in code that is being compiled."""
        if self._is_compiler_free and (torch.compiler.is_compiling() or is_frame_compiled()):
            raise InterpError(_COMPILED_INSIDE)
        if self._stance is None and not self._is_compiler_free and FLEX in sys.modules:
            with _LOCK:  # before it loads the compiler
                self._stance = torch.compiler.set_stance("force_eager")

    @property
    def _is_compiler_free(self) -> bool:
        """Whether the compiler is loaded and may compile: it was loaded inside the `with`."""
        return self._stance is None and "torch._dynamo" in sys.modules


_EAGERLY = _Eagerly()
