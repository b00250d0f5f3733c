"""Gradients of parameters that all ranks of tensor parallelism hold: summed over these ranks once a step.

By default a role sums such a gradient in the backward pass, so that any loop over micro-batches is right.
Within `summed_once` the roles do not, and one message at the end sums the shards that FSDP2 leaves to each
rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_parallel.mesh import Mesh
from forge_parallel.tensor import local_part
from forge_parallel.tensor_roles import RoleModule


class TensorSums:
    """The parameters of a model whose gradients the tp ranks sum; frozen ones may be trained later.

    Args:
        parts: the parts of the model, made parallel.
        mesh: the grid of ranks, with `tp`.
    """

    def __init__(self, parts: Sequence[nn.Module], mesh: Mesh) -> None:
        assert mesh.tp is not None, "one rank has nothing to sum"
        self._group = mesh.tp.get_group()
        self._modules: list[RoleModule] = []
        self._parameters: dict[int, nn.Parameter] = {}
        with_role = [one for part in parts for one in part.modules() if isinstance(one, RoleModule)]
        # what another module uses alike on all ranks has a gradient that is whole already
        alike = {id(p) for one in with_role for p in {*_parameters(one)} - {*_used_apart(one)}}
        for module in with_role:
            mine = _used_apart(module)
            if mine and alike.isdisjoint(map(id, mine)):
                self._modules.append(module)
                self._parameters |= {id(p): p for p in mine}

    @contextmanager
    def summed_once(self) -> Iterator[None]:
        """A context for the forward and backward passes of a step. Collective at the end."""
        if not self._parameters:
            yield
            return
        before = {key: p.grad for key, p in self._parameters.items() if p.grad is not None}
        for key in before:
            self._parameters[key].grad = None
        self._set(True)
        try:
            yield
            self._sum()
        finally:
            self._set(False)
        for key, gradient in before.items():
            _add(self._parameters[key], gradient)

    def _set(self, later: bool) -> None:
        for module in self._modules:
            module.sums_later = later

    @torch.no_grad()
    def _sum(self) -> None:
        """Sum over the ranks of tp, at least in float32; a missing gradient is missing on all of them."""
        parts = [local_part(p.grad) for p in self._parameters.values() if p.grad is not None]
        for kind in {(part.dtype, part.device) for part in parts}:
            mine = [part for part in parts if (part.dtype, part.device) == kind]
            wide = torch.promote_types(kind[0], torch.float32)
            flat = torch.cat([part.reshape(-1) for part in mine]).to(wide)
            dist.all_reduce(flat, group=self._group)
            for part, total in zip(mine, flat.split([part.numel() for part in mine]), strict=True):
                part.copy_(total.view_as(part))


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _used_apart(module: RoleModule) -> list[nn.Parameter]:
    names = set(module.used_apart())
    return [p for name, p in module._parameters.items() if p is not None and name in names]


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add to the gradient of a parameter, which may be missing."""
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
