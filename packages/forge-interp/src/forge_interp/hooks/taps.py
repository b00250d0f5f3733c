"""Who is shown what flows through a site, and at which of its calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from torch import Tensor, nn

from forge_interp.errors import InterpError
from forge_interp.hooks import values
from forge_interp.hooks.sites import Site, unwrapped
from forge_interp.hooks.torch_private import backward_number, is_recomputing


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
        skip: told, with the reason, where there is no tensor at the site; without it that is an error.
        owner: whoever it belongs to; of the modules around an attention call, each owner is told by the
            innermost.
        calls: how many calls have begun, of the module or of attention in it.
        edit: of a tap that edits, the function that does.
    """

    site: Site
    module: nn.Module
    act: Callable[[Site, nn.Module, Any], Tensor | None]
    phase: Phase
    owner: object
    calls: int = 0
    skip: Callable[[Site, str], None] | None = None
    edit: Callable[[Tensor], Tensor] | None = None
    _backward: int = field(default_factory=backward_number)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        if self.is_on_attention:
            self.module = unwrapped(self.module)

    @property
    def is_on_attention(self) -> bool:
        """Whether it is shown calls of attention, not those of the module."""
        return self.site.part == "attn"

    def begin(self) -> int | None:
        """The number of a call that begins, or None where activation checkpointing makes one again.

        That it does so from within a backward pass, begun since the tap was made.
        """
        if backward_number() not in (-1, self._backward) and is_recomputing():
            return None
        with self._lock:
            call, self.calls = self.calls, self.calls + 1
        return call

    def wants(self, call: int | None) -> bool:
        """Whether it is to be shown a call; of one that is made again it is not known."""
        return call is None or self.site.call in (None, call)

    def fire(self, call: int | None, value: Any) -> Tensor | None:
        """Show it the value of a call; what it returns takes the place of the value."""
        if call is None:
            return self._repeat(value)
        if not self.wants(call):
            return None
        return self.act(self.site.numbered(call), self.module, value)

    def _repeat(self, value: Any) -> Tensor | None:
        """Captures have seen it; edits are made again, or the gradient would be that of another function."""
        if self.phase is not Phase.EDIT:
            return None
        if self.site.call is not None and self.calls != 1:
            raise InterpError(
                f"edit of {str(self.site)!r}: activation checkpointing runs the module again and does not "
                "tell which call that is; edit all calls, or switch checkpointing off"
            )
        return None if self.site.call else self.act(self.site.numbered(0), self.module, value)


def show(tap: Tap, call: int | None, tree: Any, find: Callable[[], tuple[str, ...]]) -> Any:
    """Show a tap the tensor at the path that `find` gives; the tree that the model goes on with."""
    try:
        path = find()
        value = values.read(tree, path, tap.site)
    except InterpError as error:
        if tap.skip is None:
            raise
        if call is not None:
            tap.skip(tap.site.numbered(call), str(error))
        return tree
    new = replaced(tap, call, value)
    return tree if new is value else values.write(tree, path, new)


def replaced(tap: Tap, call: int | None, value: Tensor) -> Tensor:
    """What the model goes on with in place of a value.

    Raises:
        InterpError: it is something else than a tensor of the same shape and dtype.
    """
    new = tap.fire(call, value)
    if new is None:
        return value
    if not isinstance(new, Tensor) or (new.shape, new.dtype) != (value.shape, value.dtype):
        got = f"{list(new.shape)} {new.dtype}" if isinstance(new, Tensor) else type(new).__name__
        raise InterpError(
            f"edit of {str(tap.site)!r} gave {got}, expected {list(value.shape)} {value.dtype} like the value"
        )
    return new
