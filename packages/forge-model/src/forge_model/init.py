"""Initial values as a pure function of (seed, parameter name, index), the same for every layout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from math import prod
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from forge_model.error import ModelError

BLOCK_ELEMENTS = 1 << 18
"""Values are drawn in blocks of complete rows of about this size, each block from its own generator."""


class Shard(Protocol):
    """The box of a parameter on this rank: `forge_parallel.LocalShard` or a class with its attributes."""

    @property
    def values(self) -> Tensor:
        """The local values; shares memory with the parameter."""
        ...

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the box starts in the full parameter."""
        ...


class Init(NamedTuple):
    """How a parameter starts: `normal` with standard deviation `value`, or the constant `value`."""

    kind: Literal["normal", "constant"]
    value: float


class FullShard(NamedTuple):
    """All of a tensor."""

    values: Tensor
    offsets: tuple[int, ...]


def full_shard(parameter: Tensor) -> FullShard:
    """The shard of a parameter that is not sharded: all of it."""
    return FullShard(parameter.detach(), (0,) * parameter.ndim)


@torch.no_grad()
def initialize(model: nn.Module, seed: int, shard: Callable[[Tensor], Shard] = full_shard) -> None:
    """Give every parameter and every buffer its initial value, in place.

    Args:
        model: a module with `initial_values()`; its parameters are on a real device, sharded or not.
        seed: seed of the run.
        shard: returns the part of a tensor on this rank; `forge_parallel.local_shard` for sharded models.
            Each rank draws only the rows of its part.

    Raises:
        ModelError: a parameter or a buffer has no initial value.
    """
    rules: dict[str, Init | Tensor] = model.initial_values()  # type: ignore[operator]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if missing := [name for name, _ in tensors if name not in rules]:
        raise ModelError(
            f"{', '.join(missing)} of a {type(model).__name__} have no initial value; say it in an attribute "
            '`initial` of the module that has it: {"gate": Init("constant", 0.5), "table": torch.arange(8)}'
        )
    for name, parameter in model.named_parameters():
        local_shard = shard(parameter)
        _fill(local_shard.values, local_shard.offsets, tuple(parameter.shape), rules[name], f"{seed}/{name}")
    for name, buffer in model.named_buffers():
        _fill(buffer, (0,) * buffer.ndim, tuple(buffer.shape), rules[name], f"{seed}/{name}")


def _fill(
    local: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...], rule: Init | Tensor, key: str
) -> None:
    if isinstance(rule, Tensor):
        box = tuple(slice(o, o + n) for o, n in zip(offsets, local.shape, strict=True))
        if tuple(rule.shape) != shape:
            raise ModelError(
                f"{key.partition('/')[2]} is {list(shape)}, its initial value {list(rule.shape)}"
            )
        local.copy_(rule[box])
        return
    if rule.kind == "constant":
        local.fill_(rule.value)
        return
    if local.numel() == 0:
        return
    row = prod(shape[1:])
    rows_a_block = max(1, BLOCK_ELEMENTS // row)
    columns = tuple(slice(o, o + n) for o, n in zip(offsets[1:], local.shape[1:], strict=True))
    first, last = offsets[0], offsets[0] + local.shape[0]
    for index in range(first // rows_a_block, -(-last // rows_a_block)):
        start = index * rows_a_block
        stop = min(start + rows_a_block, shape[0])
        block = _normal((stop - start, *shape[1:]), f"{key}/{index}") * rule.value
        here = slice(max(first, start), min(last, stop))
        part = block[(slice(here.start - start, here.stop - start), *columns)]
        local[here.start - first : here.stop - first].copy_(part)


def _normal(shape: tuple[int, ...], key: str) -> Tensor:
    """Standard normal float32 numbers that only depend on the key; drawn on the CPU, whatever the device."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
