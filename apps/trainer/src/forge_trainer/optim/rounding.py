"""Stochastic rounding to bfloat16: small updates move weights on average, and are not rounded away."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from forge_parallel.tensor import local_shard
from torch import Tensor

from forge_trainer.optim.local_parameters import LocalParameters

BLOCK_ELEMENTS = 1 << 22
"""The number of elements for which random numbers are made at a time."""


class Place(NamedTuple):
    """The place of elements in a tensor, which lie in a rank's box of the tensor.

    Attributes:
        offsets: start of the box in the tensor.
        extents: shape of the box.
        shape: shape of the tensor.
        first: index of the first element in the flat box.
    """

    offsets: tuple[int, ...]
    extents: tuple[int, ...]
    shape: tuple[int, ...]
    first: int = 0

    def indices(self, start: int, count: int, device: torch.device) -> Tensor:
        """Return [count] int64, the indices in the flat tensor of the elements from number `start` on."""
        flat = torch.arange(self.first + start, self.first + start + count, device=device)
        if self.extents[1:] == self.shape[1:]:
            return flat.add_(self.offsets[0] * prod(self.shape[1:]) if self.shape else 0)
        found, stride = torch.zeros_like(flat), 1
        for offset, extent, size in zip(
            self.offsets[::-1], self.extents[::-1], self.shape[::-1], strict=True
        ):
            found += (flat % extent).add_(offset).mul_(stride)
            flat //= extent
            stride *= size
        return found


class StochasticRounding:
    """Rounds the local values of parameters stochastically.

    Random numbers are a function of the parameter's name, its step and the place in it: they are the same
    for all copies, for every layout, and after a restart.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, Place]] = {}  # by parameter; layouts never change

    def of(self, local_params: LocalParameters, group: Mapping[str, Any]) -> Callable[[int, Tensor], Tensor]:
        """Return the rounding for `LocalParameters.put_values`; it rounds bfloat16 parameters only."""
        if id(local_params.parameters[0]) not in self._known:
            for parameter, name in zip(group["params"], group["param_names"], strict=True):
                shard = local_shard(parameter)
                place = Place(shard.offsets, tuple(shard.values.shape), tuple(parameter.shape))
                self._known[id(parameter)] = _key(name), place

        def rounded(index: int, value: Tensor) -> Tensor:
            parameter = local_params.parameters[index]
            if parameter.dtype != torch.bfloat16 or not value.numel():
                return value
            key, place = self._known[id(parameter)]
            step = local_params.steps[index].long() * 0x5851F42D4C957F2D + key
            return stochastic_bfloat16(value, step, place._replace(first=local_params.first))

        return rounded


def stochastic_bfloat16(value: Tensor, key: Tensor | int, place: Place) -> Tensor:
    """Round up or down at random, to the nearer value more often; exact bfloat16 values stay.

    Args:
        value: consecutive elements, float32, finite.
        key: [] int64, different for each step of each tensor.
        place: place of the elements.
    """
    flat = value.reshape(-1)
    out = torch.empty_like(flat, dtype=torch.bfloat16)
    for start in range(0, len(flat), BLOCK_ELEMENTS):
        part = flat[start : start + BLOCK_ELEMENTS]
        noise = _mixed_(place.indices(start, len(part), value.device).mul_(-0x61C8864680B583EB).add_(key))
        bits = noise.bitwise_right_shift_(20).bitwise_and_(0xFFFF).int().add_(part.view(torch.int32))
        out[start : start + len(part)] = bits.bitwise_and_(-0x10000).view(torch.float32)
    return out.view(value.shape)


def _mixed_(numbers: Tensor) -> Tensor:
    """Turn regular numbers into pseudo-random numbers, in place (the finalizer of SplitMix64)."""
    numbers.bitwise_xor_((numbers >> 30).bitwise_and_(0x3FFFFFFFF)).mul_(-0x40A7B892E31B1A47)
    numbers.bitwise_xor_((numbers >> 27).bitwise_and_(0x1FFFFFFFFF)).mul_(-0x6B2FB644ECCEEE15)
    return numbers.bitwise_xor_((numbers >> 31).bitwise_and_(0x1FFFFFFFF))


def _key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
