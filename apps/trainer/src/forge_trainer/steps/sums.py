"""Named sums over micro-batches and ranks."""

from collections.abc import Mapping

import torch
from forge_model.loss import Sum
from forge_parallel.mesh import View
from torch import Tensor


class Sums:
    """Adds up named sums, each with its denominator, on the device.

    Args:
        dtype: what is added in; None for that of the sums.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._pairs: dict[str, Tensor] = {}

    def add(self, sums: Mapping[str, Sum]) -> None:
        """Add those of one micro-batch."""
        for name, (value, count) in sums.items():
            dtype = self._dtype or value.dtype
            pair = torch.stack([value.detach().to(dtype), count.detach().to(dtype)])
            self._pairs[name] = self._pairs[name] + pair if name in self._pairs else pair

    def totals(self, view: View) -> dict[str, Sum]:
        """Each name over all ranks of `view`. Collective; every rank has added the same names."""
        names = sorted(self._pairs)
        values, counts = view.sum_(torch.stack([self._pairs[name] for name in names])).unbind(1)
        return {name: Sum(values[i], counts[i]) for i, name in enumerate(names)}
