"""What differs between torch versions, 2.11 to 2.15, and what we work around in all of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

NAME = "torch._dynamo"


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Use an eager optimizer without loading the compiler, which takes seconds and is not needed for it.

    `torch.optim.Optimizer` imports `torch._dynamo` at its first use only to tell the compiler to keep out.
    As long as
    nobody has loaded the compiler there is nobody to tell, so a stand-in answers for the time of the block.
    """
    if NAME in sys.modules:
        yield
        return
    stand_in = ModuleType(NAME)
    stand_in.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
    stand_in.graph_break = lambda *_, **__: None  # type: ignore[attr-defined]
    sys.modules[NAME] = stand_in
    torch._dynamo = stand_in  # type: ignore[attr-defined,assignment]
    try:
        yield
    finally:
        if sys.modules.get(NAME) is stand_in:
            del sys.modules[NAME]
            # torch resolves `torch._dynamo` lazily through its module __getattr__
            del torch._dynamo
