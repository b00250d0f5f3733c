"""Which calls of modules a thread is in the middle of, and whom a call of attention is shown to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from forge_interp.attention.arguments import product_with_values
from forge_interp.attention.call import AttentionCall
from forge_interp.attention.lineage import Lineage
from forge_interp.hooks.interception import Interception, is_intercepted
from forge_interp.hooks.sites import ATTENTION_TENSORS
from forge_interp.hooks.taps import Phase, Tap, replaced
from forge_interp.hooks.torch_private import saved_tensors_hooks


class HasTaps(Protocol):
    """A module's taps."""

    @property
    def on_module(self) -> Sequence[Tap]:
        """Those that are shown calls of the module."""
        ...

    @property
    def on_attention(self) -> Sequence[Tap]:
        """Those that are shown calls of attention."""
        ...


@dataclass(eq=False)
class _Call:
    """A call of a module that has not ended.

    Attributes:
        taps: of the module.
        numbers: of this call, as each tap on the module itself counts.
        graph: whether it is in a checkpointed part, see `_part_of_graph`.
        interception: what intercepts attention for the time of this call.
        missed: edits of attention in a checkpointed part inside the module: that runs again without it.
    """

    taps: HasTaps
    numbers: dict[Tap, int | None]
    graph: Any
    interception: Interception | None
    missed: list[Tap] = field(default_factory=list)


class Running(threading.local):
    """The calls of modules that a thread is in, innermost last."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._is_busy = False

    def enter(self, taps: HasTaps) -> dict[Tap, int | None]:
        """A module is called; number the call for each tap on it.

        In a backward pass and on other threads the `with` does not intercept.
        """
        numbers = {tap: tap.begin() for tap in taps.on_module}
        interception = graph = None
        if taps.on_attention:
            graph = _part_of_graph()
            if not is_intercepted():
                interception = Interception(self.attend)
                interception.__enter__()
        self._calls.append(_Call(taps, numbers, graph, interception))
        return numbers

    def number(self, taps: HasTaps, tap: Tap) -> int | None:
        """Of the innermost call of a module; a tap that came meanwhile counts from here."""
        at = self._innermost(taps)
        numbers = {} if at is None else self._calls[at].numbers
        if tap not in numbers:
            numbers[tap] = tap.begin()
        return numbers[tap]

    def leave(self, taps: HasTaps) -> list[Tap]:
        """A module is left, and with it those inside that an exception passed through.

        Returns:
            Edits of attention that would be missed if it was recomputed.
        """
        at = self._innermost(taps)
        if at is None:
            return []
        left = self._calls[at:]
        for call in reversed(left):
            if call.interception is not None:
                call.interception.__exit__(None, None, None)
        del self._calls[at:]
        return left[0].missed

    def forget(self, taps: HasTaps) -> None:
        """Nobody looks at a module any more, though it may still be running."""
        while self._innermost(taps) is not None:
            self.leave(taps)

    def attend(
        self,
        attention: Callable[..., Tensor],
        args: tuple,
        kwargs: dict[str, Any],
        lineage: Lineage | None = None,
    ) -> Tensor:
        """Run one attention call through the taps; a call meanwhile is the same, seen by an outer `with`."""
        taps = [] if self._is_busy else self._listeners()
        if not taps:
            return attention(*args, **kwargs)
        self._is_busy = True
        try:
            return _serve(taps, attention, args, kwargs, lineage)
        finally:
            self._is_busy = False

    def _innermost(self, taps: HasTaps) -> int | None:
        for at in range(len(self._calls) - 1, -1, -1):
            if self._calls[at].taps is taps:
                return at
        return None

    def _listeners(self) -> list[Tap]:
        """The taps of each owner's innermost running module."""
        found: list[Tap] = []
        served: set[int] = set()
        here = _part_of_graph()
        for call in reversed(self._calls):
            new = [tap for tap in call.taps.on_attention if id(tap.owner) not in served]
            if call.graph != here:
                call.missed += [tap for tap in new if tap.phase is Phase.EDIT]
            found += new
            served |= {id(tap.owner) for tap in new}
        return found


def _part_of_graph() -> tuple[bool, Any]:
    """What differs inside and outside of a checkpointed part: gradients are off, or saved otherwise."""
    return torch.is_grad_enabled(), saved_tensors_hooks()


def _serve(
    taps: list[Tap],
    attention: Callable[..., Tensor],
    args: tuple,
    kwargs: dict[str, Any],
    lineage: Lineage | None,
) -> Tensor:
    edits = [tap for tap in taps if tap.phase is Phase.EDIT]
    early = [tap for tap in taps if tap.phase is Phase.BEFORE_EDITS]
    softmax = None if lineage is None else lineage.weights(attention, args)
    if softmax is None:
        call_of, run = partial(AttentionCall.of, args, kwargs, lineage=lineage), attention
    else:
        call_of = partial(AttentionCall.of_softmax, softmax, *args, lineage=lineage)
        run = partial(product_with_values, attention, *args)
    call = call_of()
    if not edits or early:
        # Gradients are those of the canonical tensors, so the model has to go on with these.
        follows = call.is_rearranged and any(x.requires_grad for x in (call.query, call.key, call.value))
        done = replace(call, output=call.run(run)) if follows else call_of(output=attention(*args, **kwargs))
        for tap in taps if not edits else early:
            tap.fire(tap.begin(), done)
        if not edits:
            return done.returned
    return _edited(run, call, edits, [tap for tap in taps if tap.phase is Phase.AFTER_EDITS])


def _edited(
    attention: Callable[..., Tensor], call: AttentionCall, edits: list[Tap], captures: list[Tap]
) -> Tensor:
    """Edit the tensors of a call in the order in which they arise, and show them to the captures."""
    named = {name: [tap for tap in edits if tap.site.path == (name,)] for name in ATTENTION_TENSORS}
    for name, attribute in (("q", "query"), ("k", "key"), ("v", "value")):
        for tap in named[name]:
            call.check_known(name)
            call = replace(call, **{attribute: replaced(tap, tap.begin(), getattr(call, attribute))})
    dense = [(name, tap) for name in ("raw", "scores", "pattern") for tap in named[name]]
    if not dense:
        call = replace(call, output=call.run(attention))
    for name, tap in dense:
        call = call.edited(name, partial(replaced, tap, tap.begin()))
    for tap in captures:
        if tap.site.path != ("z",):
            tap.fire(tap.begin(), call)
    for tap in named["z"]:
        call = replace(call, output=replaced(tap, tap.begin(), call.output))
    for tap in captures:
        if tap.site.path == ("z",):
            tap.fire(tap.begin(), call)
    return call.returned
