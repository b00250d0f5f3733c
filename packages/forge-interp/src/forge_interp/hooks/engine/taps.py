"""Who is given what flows through a site, and at which of its calls: `Tap.begin` alone counts them."""

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
    """When a tap has its turn."""

    BEFORE_EDITS = 0
    EDIT = 1
    AFTER_EDITS = 2


@dataclass(eq=False)
class Tap:
    """A callback on one site of one module.

    `act` is called with the site (its call filled in), the module and the value (of attention, for a capture,
    the `AttentionCall`); a tensor that it returns takes the value's place.
    """

    site: Site  # without wildcards
    module: nn.Module  # for attention what a checkpoint wrapper wraps, which alone runs again
    act: Callable[[Site, nn.Module, Any], Tensor | None]
    phase: Phase
    owner: object  # of the modules around an attention call, each owner is told by the innermost
    skip: Callable[[Site, str], None] | None = None  # told why there is no tensor; else that is an error
    edit: Callable[[Tensor], Tensor] | None = None  # of a tap that edits, the function that does
    calls: int = 0  # how many have begun, of the module or of attention in it
    _backward: int = field(default_factory=backward_number)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self.is_on_attention = self.site.part == "attn"
        if self.is_on_attention:
            self.module = unwrapped(self.module)

    def begin(self) -> int | None:
        """The number of a call that begins; None where activation checkpointing makes one again.

        That it does from within a backward pass, begun since the tap was made.
        """
        if backward_number() not in (-1, self._backward) and is_recomputing():
            return None
        with self._lock:
            call, self.calls = self.calls, self.calls + 1
        return call

    def fire(self, call: int | None, value: Any) -> Tensor | None:
        """Give it the value of a call; what it returns takes the place of the value.

        Captures have seen what is made again; edits are made again, or the gradient would be another's.
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
        """What the model goes on with in place of a value; InterpError for another shape or dtype."""
        new = self.fire(call, value)
        if new is None:
            return value
        if not isinstance(new, Tensor) or (new.shape, new.dtype) != (value.shape, value.dtype):
            got = f"{kind_of(new)} {getattr(new, 'dtype', '')}".strip()
            expected = f"{list(value.shape)} {value.dtype}"
            raise InterpError(f"edit of {str(self.site)!r} gave {got}, expected {expected} like the value")
        return new

    def replaced_in(self, call: int | None, tree: Any, find: Callable[[], tuple[str, ...]]) -> Any:
        """The same for the tensor at the path that `find` gives in arguments or an output."""
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
