"""How a call of scaled dot-product attention is noticed in a model that nobody changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from forge_interp.attention.lineage import Lineage
from forge_interp.hooks.torch_private import function_modes

SDPA_ONLY = (
    "F.scaled_dot_product_attention, where attention is seen, nor a softmax and its product with values: for "
    "a Hugging Face model call model.set_attn_implementation('sdpa') or 'eager', call nn.MultiheadAttention "
    "with need_weights=False (by default it computes its own softmax); FlexAttention has no such path"
)


class Interception(TorchFunctionMode):
    """Hands each attention of this thread to a function, while active.

    That is `F.scaled_dot_product_attention`, and products of a softmax over keys with values.

    `nn.MultiheadAttention` calls it inside a function that a mode sees as a whole; there the name is
    exchanged.

    Args:
        attend: called with the true function, its args, its kwargs and what was done to these before (as
            `lineage`); what it returns is the result.
    """

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self._attend = attend
        self._lineage = Lineage()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        if func is _SDPA:
            return self._attend(_SDPA, args, kwargs or {}, self._lineage)
        if self._lineage.weights(func, args) is not None:
            return self._attend(func, args, kwargs or {}, self._lineage)
        if func is F.multi_head_attention_forward:
            with _exchanged(partial(self._attend, lineage=self._lineage)):
                return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self._lineage.note(func, args, kwargs or {}, result)
        return result


def is_intercepted() -> bool:
    """Whether an `Interception` is active on this thread."""
    return any(isinstance(mode, Interception) for mode in function_modes())


_SDPA = F.scaled_dot_product_attention
_NAME = threading.RLock()


@contextmanager
def _exchanged(attend: Callable[..., Tensor]) -> Iterator[None]:
    """All threads see the exchanged name, and only one may exchange it."""
    with _NAME:
        before = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = lambda *args, **kwargs: attend(before, args, kwargs)
        try:
            yield
        finally:
            F.scaled_dot_product_attention = before
