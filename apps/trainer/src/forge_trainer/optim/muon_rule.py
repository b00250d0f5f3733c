"""The step of Muon on the matrices of one group."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from forge_parallel.mesh import Mesh
from torch import Tensor

from forge_trainer.optim.elementwise import foreach
from forge_trainer.optim.gather_matrices import MatrixExchange, Pending, portions_of
from forge_trainer.optim.local_parameters import LocalParameters
from forge_trainer.optim.newton_schulz import orthogonalize_all

if TYPE_CHECKING:
    from forge_trainer.optim.muon import MuonConfig


@dataclass
class Portion:
    """Parameters that take a step together, during this step.

    Attributes:
        local_params: this rank's shards of the parameters.
        exchange: the exchange of their matrices.
        ahead: input of the orthogonalization: the new momentum, or the look-ahead, stored in `updates`.
        updates: the orthogonal factors.
    """

    local_params: LocalParameters
    exchange: MatrixExchange
    ahead: list[Tensor]
    updates: list[Tensor]


@dataclass
class Bucket:
    """Matrices of a portion that are transferred together.

    Attributes:
        portion: the portion of the matrices.
        index: index of the bucket in the exchange.
        pending: the transfer to the owners, later the transfer back.
    """

    portion: Portion
    index: int
    pending: Pending

    @property
    def is_last(self) -> bool:
        """Whether this is the last bucket of its portion."""
        return self.index + 1 == len(self.portion.exchange.buckets)


class MuonRule:
    """The rule of Muon: momentum on shards, orthogonal factors of whole matrices at owners. A `SharedRule`.

    While one bucket is computed, the next bucket is gathered and the previous bucket is scattered.

    Args:
        config: the section `[optimizer]`.
        mesh: the grid of ranks; None in a single process.
    """

    def __init__(self, config: MuonConfig, mesh: Mesh | None = None) -> None:
        self._config, self._mesh = config, mesh
        self._exchanges: dict[tuple[int, ...], MatrixExchange] = {}
        self._load = [0] * (1 if mesh is None else mesh.stage.size)

    def portions(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """See `SharedRule.portions`."""
        return portions_of(parameters, len(self._load))

    def take(self, portions: Iterator[LocalParameters], group: Mapping[str, Any]) -> None:
        """See `SharedRule.take`. Collective over `mesh.stage`."""
        arriving: Bucket | None = None
        leaving: Bucket | None = None
        for coming in chain(self._buckets(portions), (None, None)):
            if arriving is not None:
                exchange, index = arriving.portion.exchange, arriving.index
                matrices = exchange.assembled(index, arriving.pending)
                results = orthogonalize_all(matrices, self._config.ns_steps)
                arriving.pending = exchange.scatter(index, results, arriving.portion.ahead)
            if leaving is not None:
                portion = leaving.portion
                portion.exchange.placed(leaving.index, leaving.pending, portion.updates)
                if leaving.is_last:
                    self._end(portion, group)
            leaving, arriving = arriving, coming

    def _buckets(self, portions: Iterator[LocalParameters]) -> Iterator[Bucket]:
        """Yield all buckets; each transfer to the owners begins when its bucket is requested."""
        config = self._config
        for local_params in portions:
            momentum = local_params.update(
                "lerp", local_params.state("momentum"), local_params.grads, 1 - config.momentum
            )
            if config.nesterov:
                ahead = updates = foreach("lerp", local_params.grads, momentum, config.momentum)
                local_params.put("momentum", momentum)
                del momentum
            else:
                ahead, updates = momentum, [torch.empty_like(value) for value in momentum]
            del local_params.grads  # of bfloat16 they are a copy
            portion = Portion(local_params, self._exchange(local_params), ahead, updates)
            for index in range(len(portion.exchange.buckets)):
                yield Bucket(portion, index, portion.exchange.gather(index, ahead))

    def _end(self, portion: Portion, group: Mapping[str, Any]) -> None:
        """Write the new values of a portion."""
        local_params, lr = portion.local_params, group["lr"]
        factors = [-lr * self._factor(*parameter.shape[-2:]) for parameter in local_params.parameters]
        values = local_params.update("mul", local_params.values, 1 - lr * group["weight_decay"])
        foreach("mul_", portion.updates, factors)
        foreach("add_", values, portion.updates)
        if not self._config.nesterov:
            local_params.put("momentum", portion.ahead)
        local_params.put_values(values)

    def _factor(self, rows: int, columns: int) -> float:
        if self._config.scale == "match-rms-adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(rows / columns if self._config.scale == "spectral" else max(1.0, rows / columns))

    def _exchange(self, local_params: LocalParameters) -> MatrixExchange:
        """Return the exchange of parameters that take a step together, built once for each set."""
        key = tuple(map(id, local_params.parameters))
        if key not in self._exchanges:
            mesh = self._mesh or Mesh(local_params.parameters[0].device)
            splits = [(1, 0)] * len(local_params.parameters)
            made = MatrixExchange(
                local_params.parameters, mesh, splits, self._dtype(local_params), self._load
            )
            self._exchanges[key] = made
        return self._exchanges[key]

    def _dtype(self, local_params: LocalParameters) -> torch.dtype:
        wide = local_params.wide[0]
        if wide == torch.float64:
            return wide
        device = local_params.parameters[0].device.type
        compute = self._config.compute
        return torch.bfloat16 if compute == "bfloat16" or (compute == "auto" and device == "cuda") else wide
