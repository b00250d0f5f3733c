"""Named sums over micro-batches and ranks."""

from collections.abc import Mapping

import torch
from forge_model.loss.cross_entropy import Sum
from forge_parallel.mesh import Mesh
from torch import Tensor


class Sums:
    """Adds up named sums, each with its denominator, on the device.

    Args:
        dtype: dtype of the addition; None for the dtype of the sums.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._pairs: dict[str, Tensor] = {}

    def add(self, sums: Mapping[str, Sum]) -> None:
        """Add the sums of one micro-batch."""
        for name, (value, count) in sums.items():
            dtype = self._dtype or value.dtype
            pair = torch.stack([value.detach().to(dtype), count.detach().to(dtype)])
            self._pairs[name] = self._pairs[name] + pair if name in self._pairs else pair

    def names(self, mesh: Mesh) -> dict[str, torch.dtype]:
        """Return the names and dtypes of all sums that any pipeline stage adds. Collective."""
        mine = {name: pair.dtype for name, pair in self._pairs.items()}
        if mesh.pipeline.size == 1:
            return mine
        import torch.distributed as dist

        everyone: list[dict[str, torch.dtype]] = [{}] * dist.get_world_size(mesh.control_group)
        dist.all_gather_object(everyone, mine, group=mesh.control_group)
        return {name: dtype for names in everyone for name, dtype in names.items()}

    def totals(self, mesh: Mesh, names: Mapping[str, torch.dtype]) -> dict[str, Sum]:
        """Return the sum of each name over all ranks. Collective.

        Args:
            mesh: the grid of ranks.
            names: all names and their dtypes, equal on every rank; a name never added here counts as zero.
        """
        if not names:
            return {}
        ordered = sorted(names)
        pairs = [
            self._pairs[name].to(dtype)
            if name in self._pairs
            else torch.zeros(2, dtype=dtype, device=mesh.device)
            for name, dtype in ((name, self._dtype or names[name]) for name in ordered)
        ]
        values, counts = mesh.pipeline.sum_(mesh.loss.sum_(torch.stack(pairs))).unbind(1)
        return {name: Sum(values[i], counts[i]) for i, name in enumerate(ordered)}
