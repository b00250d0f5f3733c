"""Looks for what makes the host wait for a device; works without one."""

from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

READS = {Tensor: ("item", "tolist", "numpy", "cpu", "nonzero"), torch: ("nonzero", "equal")}
MADE = {torch: ("tensor", "as_tensor", "asarray")}


class Waits:
    """Counts calls that make the host wait, also in backward passes, which no mode of torch sees."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._stack = ExitStack()

    def __enter__(self) -> "Waits":
        for asked, counts in ((READS, lambda *_, **__: True), (MADE, _is_copied)):
            for place, names in asked.items():
                for name in names:
                    counted = self._counted(name, getattr(place, name), counts)
                    self._stack.enter_context(patch.object(place, name, counted))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _counted(self, name: str, function: Any, counts: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.found[name] += bool(counts(*args, **kwargs))
            return function(*args, **kwargs)

        return call


def _is_copied(value: Any, **kwargs: Any) -> bool:
    """Whether a number of the host goes to a device."""
    return not isinstance(value, Tensor) and kwargs.get("device") is not None


class Reads(TorchDispatchMode):
    """Counts what no function of Python calls: `bool(tensor)`, an index that is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        if name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))
