"""Calls of compiled functions that torch compiles anew for many number formats, shapes and modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from forge_model.error import ModelError


def call_compiled(
    what: str, compiled: Callable[..., Any], limit: int, *arguments: Any, **options: Any
) -> Any:
    """Call a compiled function, which may be compiled anew up to `limit` times; the limit of torch is 8.

    Args:
        what: subject of the error message, such as "FlexAttention was".
        compiled: the function, compiled by torch with `fullgraph`.
        limit: most compilations of all functions that share its code.
        *arguments: positional arguments of the call.
        **options: keyword arguments of the call.

    Raises:
        ModelError: the limit is reached.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit

    try:
        return compiled(*arguments, **options)
    except FailOnRecompileLimitHit:
        pass
    try:
        with torch._dynamo.config.patch(recompile_limit=limit, accumulated_recompile_limit=4 * limit):
            return compiled(*arguments, **options)
    except FailOnRecompileLimitHit:
        raise ModelError(
            f"{what} compiled {limit} times, for as many number formats, widths and kinds of inputs; "
            "uncompiled it would hold far more memory: use fewer in a process"
        ) from None
