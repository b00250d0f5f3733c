"""Calls of what torch compiles anew for other formats, shapes and modes, more often than torch would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from forge_model.error import ModelError


def call_compiled(
    what: str, compiled: Callable[..., Any], limit: int, *arguments: Any, **options: Any
) -> Any:
    """Call it, compiled anew up to `limit` times; torch ends a run, or goes on uncompiled, after 8.

    Args:
        what: is called, in the words of an error.
        compiled: by torch, with `fullgraph`.
        limit: of all that share its code.
        *arguments: of the call.
        **options: of the call, by name.

    Raises:
        ModelError: it was compiled so many times.
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
