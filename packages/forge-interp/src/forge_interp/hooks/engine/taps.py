"""Who receives the values at a site, and at which of its calls? `Tap.begin` alone counts the calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from torch import Tensor, nn

from forge_interp.errors import InterpError, kind_of
from forge_interp.hooks.engine import values
from forge_interp.hooks.engine.torch_private import backward_number, is_recomputing
from forge_interp.hooks.sites import Site, unwrapped


class Phase(IntEnum):
    """The order in which taps run."""

    BEFORE_EDITS = 0
    EDIT = 1
    AFTER_EDITS = 2


@dataclass(eq=False)
class Tap:
    """A callback on one site of one module.

    `act` takes the site (with its call number), the module and the value (for a capture of attention the
    `AttentionCall`); a tensor that it returns replaces the value.
    """

    site: Site  # without wildcards
    module: nn.Module  # for attention the module in a checkpoint wrapper: it alone runs again
    act: Callable[[Site, nn.Module, Any], Tensor | None]
    phase: Phase
    owner: object  # attention calls go to the innermost module among those of an owner
    skip: Callable[[Site, str], None] | None = None  # takes the reason why there is no tensor; None: an error
    edit: Callable[[Tensor], Tensor] | None = None  # the function of a tap that edits
    calls: int = 0  # number of calls begun, of the module or of attention in it
    _backward: int = field(default_factory=backward_number)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self.is_on_attention = self.site.part == "attn"
        if self.is_on_attention:
            self.module = unwrapped(self.module)

    def begin(self) -> int | None:
        """Return the number of the call that begins; None where activation checkpointing repeats a call.

        Such a repetition runs inside a backward pass that began after the tap was made.
        """
        if backward_number() not in (-1, self._backward) and is_recomputing():
            return None
        with self._lock:
            call, self.calls = self.calls, self.calls + 1
        return call

    def fire(self, call: int | None, value: Any) -> Tensor | None:
        """Call `act` with the value of a call; its result replaces the value.

        A repeated call is edited again, or its gradient would be wrong; captures do not see it again.
        """
        if call is not None:
            is_wanted = self.site.call in (None, call)
            return self.act(self.site.numbered(call), self.module, value) if is_wanted else None
        if self.phase is not Phase.EDIT:
            return None
        if self.site.call is not None and self.calls != 1:
            raise InterpError(
                f"edit of {str(self.site)!r}: activation checkpointing runs the module again and does not "
                "tell which call that is; edit all calls, or switch checkpointing off"
            )
        return None if self.site.call else self.act(self.site.numbered(0), self.module, value)

    def replaced(self, call: int | None, value: Tensor) -> Tensor:
        """Return the tensor that replaces a value; InterpError for another shape or dtype."""
        new = self.fire(call, value)
        if new is None:
            return value
        if not isinstance(new, Tensor) or (new.shape, new.dtype) != (value.shape, value.dtype):
            got = f"{kind_of(new)} {getattr(new, 'dtype', '')}".strip()
            expected = f"{list(value.shape)} {value.dtype}"
            raise InterpError(f"edit of {str(self.site)!r} gave {got}, expected {expected} like the value")
        return new

    def replaced_in(self, call: int | None, tree: Any, find: Callable[[], tuple[str, ...]]) -> Any:
        """Replace the tensor in arguments or an output at the path that `find` returns."""
        if call is not None and self.site.call not in (None, call):
            return tree
        try:
            path = find()
            value = values.read(tree, path, self.site)
        except InterpError as error:
            if self.skip is None:
                raise
            if call is not None:
                self.skip(self.site.numbered(call), str(error))
            return tree
        new = self.replaced(call, value)
        return tree if new is value else values.write(tree, path, new)
