"""Who sees what flows through a module, and in which order.

A tap is a callback on a site. All taps on a module share one set of hooks, held by a board, so that the
order is the same whoever came first: captures that want the value before edits, then edits, then all other
captures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from forge_interp.attention.call import AttentionCall
from forge_interp.errors import InterpError
from forge_interp.hooks import values
from forge_interp.hooks.interception import Interception, is_intercepted
from forge_interp.hooks.sites import ATTENTION_TENSORS, Site


class Phase(IntEnum):
    """When a tap has its turn."""

    BEFORE_EDITS = 0
    EDIT = 1
    AFTER_EDITS = 2


@dataclass(eq=False)
class Tap:
    """A callback on one site of one module.

    Attributes:
        site: the site, without wildcards.
        module: the module it names; for attention what a checkpoint wrapper wraps, which alone runs again.
        act: called with the site (its call filled in), the module and the value; a tensor that it returns
            takes the value's place. Captures of attention are given the `AttentionCall`, which is not
            replaced.
        phase: when it has its turn.
        owner: whoever it belongs to; of the modules around an attention call, each owner is told by the
            innermost.
        calls: how many calls have begun, of the module or of attention in it.
        open: numbers of the module's calls that have not ended, innermost last.
        misses_recomputation: whether attention was called in a checkpointed part inside the module: when that
            runs again, the module does not.
    """

    site: Site
    module: nn.Module
    act: Callable[[Site, nn.Module, Any], Tensor | None]
    phase: Phase
    owner: object
    calls: int = 0
    open: list[int] = field(default_factory=list)
    misses_recomputation: bool = False
    _backward: int = field(default_factory=torch._C._current_graph_task_id)

    def __post_init__(self) -> None:
        while self.is_on_attention and hasattr(self.module, "_checkpoint_wrapped_module"):
            self.module = self.module._checkpoint_wrapped_module  # type: ignore[assignment]

    @property
    def is_on_attention(self) -> bool:
        """Whether it is shown calls of attention, not those of the module."""
        return self.site.part == "attn"

    @property
    def is_in_recomputation(self) -> bool:
        """Whether activation checkpointing runs the module again: from within a backward pass begun since."""
        return torch._C._current_graph_task_id() not in (-1, self._backward)

    def begin(self) -> None:
        """A call of the module begins."""
        if not self.is_in_recomputation:
            self.open.append(self.calls)
            self.calls += 1

    def end(self) -> None:
        """The innermost call of the module has ended, or failed."""
        if self.open and not self.is_in_recomputation:
            self.open.pop()

    def fire(self, value: Any) -> Tensor | None:
        """Show it a value; what it returns takes the place of the value."""
        if self.is_in_recomputation:
            return self._repeat(value)
        if self.is_on_attention or not self.open:
            call, self.calls = self.calls, self.calls + 1
        else:
            call = self.open[-1]
        if self.site.call not in (None, call):
            return None
        return self.act(self.site.at(call), self.module, value)

    def _repeat(self, value: Any) -> Tensor | None:
        """Captures have seen it; edits are made again, or the gradient would be that of another function."""
        if self.phase is not Phase.EDIT:
            return None
        if self.site.call is not None and self.calls != 1:
            raise InterpError(
                f"edit of {str(self.site)!r}: activation checkpointing runs the module again and does not "
                "tell which call that is; edit all calls, or switch checkpointing off"
            )
        return None if self.site.call else self.act(self.site.at(0), self.module, value)


class _Board:
    """The taps of one module and the hooks that serve them.

    A copy of a module takes copies of its hooks along, also through a pickle: those lead to an empty board.

    Attributes:
        taps: all, in their order.
        on_attention: those that are shown calls of attention.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._arrange([])

    def __reduce__(self) -> tuple[type[_Board], tuple[()]]:
        return _Board, ()

    def hang(self, module: nn.Module) -> None:
        """Have the module call it."""
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
            _ATTENTION.forget(self)
            for handle in self._handles:
                handle.remove()
        return not self.taps

    def _arrange(self, taps: list[Tap]) -> None:
        self.taps = sorted(taps, key=lambda t: t.phase)
        self.on_attention = [tap for tap in self.taps if tap.is_on_attention]
        self._on_module = [tap for tap in self.taps if not tap.is_on_attention]
        self._on_output = [tap for tap in self._on_module if tap.site.part == "out"]
        self._on_input = [tap for tap in self._on_module if tap.site.part != "out"]

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        for tap in self._on_module:
            tap.begin()
        if self.on_attention:
            _ATTENTION.enter(self)
        if not self._on_input:
            return None
        call: dict[str, Any] = {"args": args, "kwargs": kwargs}
        for tap in self._on_input:
            path = values.argument(module, call["args"], call["kwargs"], tap.site)
            call = _show(tap, call, path)
        changed = call["args"] is not args or call["kwargs"] is not kwargs
        return (call["args"], call["kwargs"]) if changed else None

    def _after(self, module: nn.Module, args: tuple, output: Any) -> Any:
        shown = output
        for tap in self._on_output:
            shown = _show(tap, shown, tap.site.path)
        return None if shown is output else shown

    def _left(self, module: nn.Module, args: tuple, output: Any) -> None:
        _ATTENTION.leave(self)
        for tap in self._on_module:
            tap.end()


class _Attention(threading.local):
    """The boards whose modules this thread runs, innermost last, and whom an attention call is shown to."""

    def __init__(self) -> None:
        self._running: list[tuple[_Board, Any, Interception | None]] = []
        self._is_busy = False

    def enter(self, board: _Board) -> None:
        """A module is entered; in a backward pass and on other threads, the `with` does not intercept."""
        own = None if is_intercepted() else Interception(self.attend, _check_backward)
        if own is not None:
            own.__enter__()
        self._running.append((board, _part_of_graph(), own))

    def leave(self, board: _Board) -> None:
        """A module is left, and with it those inside that an exception passed through."""
        running = [entry[0] for entry in self._running]
        if board not in running:
            return
        last = len(running) - 1 - running[::-1].index(board)
        for _, _, own in reversed(self._running[last:]):
            if own is not None:
                own.__exit__(None, None, None)
        del self._running[last:]

    def forget(self, board: _Board) -> None:
        """Its taps are gone, though its module may still be running."""
        while any(entry[0] is board for entry in self._running):
            self.leave(board)

    def taps(self) -> list[Tap]:
        """Those of each owner's innermost running module, in their order."""
        found: list[Tap] = []
        served: set[int] = set()
        here = _part_of_graph()
        for board, where, _ in reversed(self._running):
            new = [tap for tap in board.on_attention if id(tap.owner) not in served]
            for tap in new:
                tap.misses_recomputation |= where != here and not tap.is_in_recomputation
            found += new
            served |= {id(tap.owner) for tap in new}
        return sorted(found, key=lambda tap: tap.phase)

    def attend(self, attention: Callable[..., Tensor], args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """Run one attention call through the taps; a call meanwhile is the same, seen by an outer `with`."""
        taps = [] if self._is_busy else self.taps()
        if not taps:
            return attention(*args, **kwargs)
        self._is_busy = True
        try:
            return _serve(taps, attention, args, kwargs)
        finally:
            self._is_busy = False


def _part_of_graph() -> tuple[bool, Any]:
    """What differs inside and outside of a checkpointed part: gradients are off, or saved otherwise."""
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)


def _check_backward() -> None:
    """A backward pass begins: refuse it where attention, edited, would be recomputed without the edit."""
    with _LOCK:
        taps = [tap for board in _BOARDS.values() for tap in board.on_attention]
    for tap in taps:
        if tap.phase is Phase.EDIT and tap.misses_recomputation:
            raise InterpError(
                f"edit of {str(tap.site)!r}: activation checkpointing (or no_grad) is inside that module, so "
                "that the edit is not made again when attention is recomputed; name the module inside that "
                "is checkpointed, or switch checkpointing off"
            )


def _serve(taps: list[Tap], attention: Callable[..., Tensor], args: tuple, kwargs: dict[str, Any]) -> Tensor:
    edits = [tap for tap in taps if tap.phase is Phase.EDIT]
    early = [tap for tap in taps if tap.phase is Phase.BEFORE_EDITS]
    if not edits or early:
        call = AttentionCall.of(args, kwargs, attention(*args, **kwargs))
        for tap in taps if not edits else early:
            tap.fire(call)
        if not edits:
            return call.output
    late = [tap for tap in taps if tap.phase is Phase.AFTER_EDITS]
    return _edited(attention, args, kwargs, edits, late)


def _edited(
    attention: Callable[..., Tensor], args: tuple, kwargs: dict, edits: list[Tap], captures: list[Tap]
) -> Tensor:
    """Edit the tensors of a call in the order in which they arise, and show them to the captures."""
    call = AttentionCall.of(args, kwargs)
    named = {name: [tap for tap in edits if tap.site.path == (name,)] for name in ATTENTION_TENSORS}
    for name, field_ in (("q", "query"), ("k", "key"), ("v", "value")):
        for tap in named[name]:
            call = replace(call, **{field_: _replaced(tap, getattr(call, field_))})
    dense = [(name, tap) for name in ("raw", "scores", "pattern") for tap in named[name]]
    if not dense:
        call = replace(call, output=call.run(attention))
    for name, tap in dense:
        call = call.edited(name, partial(_replaced, tap))
    for tap in captures:
        if tap.site.path != ("z",):
            tap.fire(call)
    for tap in named["z"]:
        call = replace(call, output=_replaced(tap, call.output))
    for tap in captures:
        if tap.site.path == ("z",):
            tap.fire(call)
    return call.output


def _show(tap: Tap, tree: Any, path: tuple[str, ...]) -> Any:
    value = values.read(tree, path, tap.site)
    new = _replaced(tap, value)
    return tree if new is value else values.write(tree, path, new)


def _replaced(tap: Tap, value: Tensor) -> Tensor:
    new = tap.fire(value)
    if new is None:
        return value
    if not isinstance(new, Tensor) or (new.shape, new.dtype) != (value.shape, value.dtype):
        got = f"{list(new.shape)} {new.dtype}" if isinstance(new, Tensor) else type(new).__name__
        raise InterpError(
            f"edit of {str(tap.site)!r} gave {got}, expected {list(value.shape)} {value.dtype} like the value"
        )
    return new


# Hooks are state of modules that several contexts share, and their order must be agreed: so the boards are
# shared. Attention is that of a thread.
_BOARDS: WeakKeyDictionary[nn.Module, _Board] = WeakKeyDictionary()
_ATTENTION = _Attention()
_EAGERLY = ExitStack()
_NUM_ATTACHED = 0
_LOCK = threading.RLock()


@contextmanager
def attached(taps: Sequence[Tap]) -> Iterator[None]:
    """Attach taps for the time of a `with`; compiled models run eagerly then, or hooks were passed over."""
    with ExitStack() as stack:
        for tap in taps:
            _attach(tap)
            stack.callback(_detach, tap)
        if any(tap.is_on_attention for tap in taps):
            stack.enter_context(Interception(_ATTENTION.attend, _check_backward))
        stack.enter_context(_eagerly())
        yield


def _attach(tap: Tap) -> None:
    with _LOCK:
        if tap.module not in _BOARDS:
            _BOARDS[tap.module] = _Board()
            _BOARDS[tap.module].hang(tap.module)
        _BOARDS[tap.module].add(tap)


def _detach(tap: Tap) -> None:
    with _LOCK:
        if _BOARDS[tap.module].remove(tap):
            del _BOARDS[tap.module]


@contextmanager
def _eagerly() -> Iterator[None]:
    """No compiled code runs; what was allowed before is allowed again when the last `with` is left."""
    global _NUM_ATTACHED
    with _LOCK:
        if _NUM_ATTACHED == 0:
            _EAGERLY.enter_context(torch.compiler.set_stance("force_eager"))
        _NUM_ATTACHED += 1
    try:
        yield
    finally:
        with _LOCK:
            _NUM_ATTACHED -= 1
            if _NUM_ATTACHED == 0:
                _EAGERLY.close()
