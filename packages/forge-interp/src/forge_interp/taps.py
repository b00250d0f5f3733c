"""Who sees what flows through a module, and in which order.

A tap is a callback on a site. All taps on a module share one pair of hooks, held by a board, so that the
order is the same whoever came first: captures that want the value before edits, then edits, then all other
captures.
"""

from __future__ import annotations

import sys
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

from forge_interp import values
from forge_interp.attention import AttentionCall
from forge_interp.errors import InterpError
from forge_interp.interception import Interception
from forge_interp.sites import ATTENTION_TENSORS, Site


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
        module: the module it names.
        act: called with the site (its call filled in), the module and the value; a tensor that it returns
            takes the value's place. Captures of attention are given the `AttentionCall`, which is not
            replaced.
        phase: when it has its turn.
        owner: whoever it belongs to; of the modules around an attention call, each owner is told by the
            innermost.
        calls: how often it has been called.
    """

    site: Site
    module: nn.Module
    act: Callable[[Site, nn.Module, Any], Tensor | None]
    phase: Phase
    owner: object
    calls: int = 0
    _thread: int = field(default_factory=threading.get_ident)

    def fire(self, value: Any) -> Tensor | None:
        """Show it a value; what it returns takes the place of the value."""
        if self.in_recomputation:
            return self._repeat(value)
        call = self.calls
        self.calls += 1
        if self.site.call not in (None, call):
            return None
        return self.act(self.site.at(call), self.module, value)

    @property
    def in_recomputation(self) -> bool:
        """Whether activation checkpointing runs the module again, from within the backward pass."""
        return torch._C._current_graph_task_id() >= 0

    def _repeat(self, value: Any) -> Tensor | None:
        """Captures have seen it; edits are made again, or the gradient would be that of another function."""
        if self.phase is not Phase.EDIT:
            return None
        if self.site.part == "attn" and threading.get_ident() != self._thread:
            raise InterpError(
                f"edit of {str(self.site)!r}: recomputed on another thread, where attention cannot be "
                "intercepted; switch activation checkpointing off"
            )
        if self.site.call is not None and self.calls != 1:
            raise InterpError(
                f"edit of {str(self.site)!r}: activation checkpointing runs the module again and does not "
                "tell which call that is; edit all calls, or switch checkpointing off"
            )
        return None if self.site.call else self.act(self.site.at(0), self.module, value)


class _Board:
    """The taps of one module and the hooks that serve them."""

    def __init__(self, module: nn.Module) -> None:
        self.taps: list[Tap] = []
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after),
            module.register_forward_hook(self._left, always_call=True),
        ]

    def add(self, tap: Tap) -> None:
        self.taps = sorted([*self.taps, tap], key=lambda t: t.phase)

    def remove(self, tap: Tap) -> bool:
        """Whether that was the last one; the hooks are gone then."""
        self.taps = [t for t in self.taps if t is not tap]
        if not self.taps:
            for handle in self._handles:
                handle.remove()
        return not self.taps

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if any(tap.site.part == "attn" for tap in self.taps):
            _ATTENTION.enter(self)
        call: dict[str, Any] = {"args": args, "kwargs": kwargs}
        for tap in self.taps:
            if tap.site.part in ("in", "kw"):
                path = values.argument(module, call["args"], call["kwargs"], tap.site)
                call = _show(tap, call, path)
        changed = call["args"] is not args or call["kwargs"] is not kwargs
        return (call["args"], call["kwargs"]) if changed else None

    def _after(self, module: nn.Module, args: tuple, output: Any) -> Any:
        shown = output
        for tap in self.taps:
            if tap.site.part == "out":
                shown = _show(tap, shown, tap.site.path)
        return None if shown is output else shown

    def _left(self, module: nn.Module, args: tuple, output: Any) -> None:
        _ATTENTION.leave(self)


class _Attention:
    """The boards whose modules are running, innermost last, and the taps that an attention call goes to."""

    def __init__(self) -> None:
        self._running: list[_Board] = []
        self._is_busy = False

    def enter(self, board: _Board) -> None:
        self._running.append(board)

    def leave(self, board: _Board) -> None:
        if board in self._running:
            del self._running[self._running.index(board) :]

    def taps(self) -> list[Tap]:
        """Those of each owner's innermost running module, in their order."""
        found: list[Tap] = []
        served: set[int] = set()
        for board in reversed(self._running):
            here = [tap for tap in board.taps if tap.site.part == "attn" and id(tap.owner) not in served]
            found += here
            served |= {id(tap.owner) for tap in here}
        return sorted(found, key=lambda tap: tap.phase)

    def attend(self, attention: Callable[..., Tensor], args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """Run one attention call through the taps; a call meanwhile is the same, seen by an outer `with`."""
        taps = [] if self._is_busy else self.taps()
        if not taps:
            return attention(*args, **kwargs)
        self._is_busy = True
        try:
            return self._serve(taps, attention, args, kwargs)
        finally:
            self._is_busy = False

    def _serve(
        self, taps: list[Tap], attention: Callable[..., Tensor], args: tuple, kwargs: dict[str, Any]
    ) -> Tensor:
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
# shared.
_BOARDS: WeakKeyDictionary[nn.Module, _Board] = WeakKeyDictionary()
_ATTENTION = _Attention()


@contextmanager
def attached(taps: Sequence[Tap]) -> Iterator[None]:
    """Attach taps for the time of a `with`; compiled models run eagerly then, or hooks were passed over."""
    with ExitStack() as stack:
        for tap in taps:
            if tap.module not in _BOARDS:
                _BOARDS[tap.module] = _Board(tap.module)
            _BOARDS[tap.module].add(tap)
            stack.callback(_detach, tap)
        if any(tap.site.part == "attn" for tap in taps):
            stack.enter_context(Interception(_ATTENTION.attend))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _detach(tap: Tap) -> None:
    if _BOARDS[tap.module].remove(tap):
        del _BOARDS[tap.module]
