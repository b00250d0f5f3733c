"""Stochastic rounding to bfloat16: small updates move weights on average, instead of being rounded away."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from forge_parallel.tensor import local_shard
from torch import Tensor

from forge_trainer.optim.held import Held

BLOCK_ELEMENTS = 1 << 24
"""Random numbers are made for about so many elements at a time."""


class StochasticRounding:
    """Rounds what a rank holds; see `Held.put_values`.

    Random numbers are a function of the name of the parameter, its step and the place in it: the same for all
    copies, for every layout, and after a restart.

    Args:
        held: what is rounded.
        group: its entries.
    """

    def __init__(self, held: Held, group: Mapping[str, Any]) -> None:
        names = dict(zip(map(id, group["params"]), group["param_names"], strict=True))
        self._held = held
        self._keys = [_key(names[id(parameter)]) for parameter in held.parameters]

    def __call__(self, index: int, value: Tensor) -> Tensor:
        """New values of one parameter, in its dtype; those of wider ones than bfloat16 as they are."""
        parameter = self._held.parameters[index]
        if parameter.dtype != torch.bfloat16 or not value.numel():
            return value
        offsets = local_shard(parameter).offsets
        key = self._held.steps[index].long() * 0x5851F42D4C957F2D + self._keys[index]
        return stochastic_bfloat16(value, key, offsets, tuple(parameter.shape))


def stochastic_bfloat16(
    value: Tensor, key: Tensor | int, offsets: tuple[int, ...], shape: tuple[int, ...]
) -> Tensor:
    """Round up or down, the more likely the nearer; what bfloat16 can hold stays.

    Args:
        value: a box of a tensor, float32, finite.
        key: [] int64, another for each step of each tensor.
        offsets: where in the tensor the box starts.
        shape: of the tensor.
    """
    rows = max(1, BLOCK_ELEMENTS // max(1, value[0].numel())) if value.ndim else 1
    if value.ndim and len(value) > rows:
        parts = [
            stochastic_bfloat16(part, key, (offsets[0] + i * rows, *offsets[1:]), shape)
            for i, part in enumerate(value.split(rows))
        ]
        return torch.cat(parts)
    place = torch.zeros((), dtype=torch.int64, device=value.device)
    for dim, (offset, length) in enumerate(zip(offsets, value.shape, strict=True)):
        along = torch.arange(offset, offset + length, device=value.device)
        place = place * shape[dim] + along.view(-1, *(1 for _ in value.shape[dim + 1 :]))
    noise = (_mixed(place * -0x61C8864680B583EB + key) >> 20) & 0xFFFF
    bits = value.contiguous().view(torch.int32) + noise.int()
    return (bits & -0x10000).view(torch.float32).bfloat16()


def _mixed(numbers: Tensor) -> Tensor:
    """Numbers that look random, from numbers that do not (the finalizer of SplitMix64)."""
    numbers = (numbers ^ ((numbers >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    numbers = (numbers ^ ((numbers >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return numbers ^ ((numbers >> 31) & 0x1FFFFFFFF)


def _key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
