"""The step of Muon on the matrices of one group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from forge_parallel.mesh import Mesh
from torch import Tensor

from forge_trainer.optim.exchange import Exchange, Pending
from forge_trainer.optim.held import Held, foreach
from forge_trainer.optim.newton_schulz import orthogonalize_all

if TYPE_CHECKING:
    from forge_trainer.optim.muon import MuonConfig


class MuonRule:
    """Momentum on what a rank holds, orthogonal factors of whole matrices at their owners.

    While the matrices of one bucket are worked on, those of the next one arrive.

    Args:
        config: of the optimizer.
        mesh: the grid of ranks; None in a lone process.
    """

    together = True

    def __init__(self, config: MuonConfig, mesh: Mesh | None = None) -> None:
        self._config, self._mesh = config, mesh
        self._exchanges: dict[tuple[int, ...], Exchange] = {}

    def __call__(self, held: Held, group: Mapping[str, Any]) -> None:
        """Take a step. Collective over `mesh.stage`."""
        config, lr = self._config, group["lr"]
        momentum = held.update("lerp", held.state("momentum"), held.grads, 1 - config.momentum)
        ahead = foreach("lerp", held.grads, momentum, config.momentum) if config.nesterov else momentum
        updates = self._orthogonal(held, ahead)
        factors = [-lr * self._factor(*parameter.shape[-2:]) for parameter in held.parameters]
        values = held.update("mul", held.values, 1 - lr * group["weight_decay"])
        foreach("mul_", updates, factors)
        foreach("add_", values, updates)
        held.put("momentum", momentum)
        held.put_values(values)

    def _factor(self, rows: int, columns: int) -> float:
        if self._config.scale == "match-rms-adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(rows / columns if self._config.scale == "spectral" else max(1.0, rows / columns))

    def _orthogonal(self, held: Held, ahead: list[Tensor]) -> list[Tensor]:
        """The orthogonal factors, each rank's part of them."""
        exchange = self._exchange(held)
        updates = [torch.empty_like(value) for value in ahead]
        buckets = exchange.buckets
        coming: Pending | None = exchange.gather(buckets[0], ahead)
        leaving: list[Pending] = []
        for index, bucket in enumerate(buckets):
            assert coming is not None
            matrices = exchange.assembled(bucket, coming)
            coming = exchange.gather(buckets[index + 1], ahead) if index + 1 < len(buckets) else None
            results = orthogonalize_all(matrices, self._config.ns_steps)
            leaving.append(exchange.scatter(bucket, results, ahead))
        for bucket, pending in zip(buckets, leaving, strict=True):
            exchange.placed(bucket, pending, updates)
        return updates

    def _exchange(self, held: Held) -> Exchange:
        """Made once for each set of parameters that take a step together."""
        key = tuple(map(id, held.parameters))
        if key not in self._exchanges:
            mesh = self._mesh or Mesh(held.parameters[0].device)
            splits = [(1, 0)] * len(held.parameters)
            self._exchanges[key] = Exchange(held.parameters, mesh, splits, self._dtype(held))
        return self._exchanges[key]

    def _dtype(self, held: Held) -> torch.dtype:
        wide = held.wide[0]
        if wide == torch.float64:
            return wide
        device = held.parameters[0].device.type
        compute = self._config.compute
        return torch.bfloat16 if compute == "bfloat16" or (compute == "auto" and device == "cuda") else wide
