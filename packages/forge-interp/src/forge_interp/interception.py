"""How a call of scaled dot-product attention is noticed in a model that nobody changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Interception(TorchFunctionMode):
    """Hands each `F.scaled_dot_product_attention` of this thread to a function, while active.

    `nn.MultiheadAttention` calls it inside a function that a mode sees as a whole; there the name is
    exchanged.

    Args:
        attend: called with the true function, its args and its kwargs; what it returns is the result.
    """

    def __init__(self, attend: Callable[[Callable[..., Tensor], tuple, dict[str, Any]], Tensor]) -> None:
        super().__init__()
        self._attend = attend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        if func is _SDPA:
            return self._attend(_SDPA, args, kwargs or {})
        if func is F.multi_head_attention_forward:
            with _exchanged(self._attend):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_SDPA = F.scaled_dot_product_attention


@contextmanager
def _exchanged(attend: Callable[..., Tensor]) -> Any:
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = lambda *args, **kwargs: attend(partial(before), args, kwargs)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before
