"""Which activations are computed again in the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


def checkpoint_activations(blocks: Iterable[nn.Module]) -> None:
    """Keep only the inputs of each block and run its forward again in the backward pass, in place.

    Names of parameters do not change, unlike with torch's wrapper module.
    """
    for block in blocks:
        block.forward = _checkpointed(block.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint

    # A function of its own, not a partial: the compiler needs a frame to look into.
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
