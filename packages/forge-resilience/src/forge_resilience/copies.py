"""Whether ranks with copies of the same tensors hold the same bits: a flipped bit is silent otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_resilience.finding import Finding, short_names

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def digests(tensors: Sequence[Tensor]) -> Tensor:
    """Return a number for each tensor, from its bits; any single flipped bit changes it. Does not wait.

    It is the sum of the elements read as integers, modulo 2^64: cheap, and safe against accidents only.

    Args:
        tensors: this rank's tensors, plain, on one device.

    Returns:
        [n] int64.
    """
    return torch.stack([_bits(tensor).sum(dtype=torch.int64) for tensor in tensors])


def _bits(tensor: Tensor) -> Tensor:
    """The elements as integers, sharing memory where it can be."""
    tensor = tensor.detach().contiguous()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def differing(mine: Tensor, group: ProcessGroup) -> Tensor:
    """Return which digests differ between the ranks of a group. Collective; does not wait.

    Args:
        mine: [n] int64, of this rank.
        group: ranks that hold copies of the same tensors.

    Returns:
        [n] bool, the same on all ranks of the group.
    """
    import torch.distributed as dist

    both = torch.stack([mine, ~mine])  # the highest complement is the complement of the lowest
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return both[0] != ~both[1]


@dataclass(frozen=True)
class Copy:
    """One of several copies that differ.

    Attributes:
        rank: global rank.
        host: name of its host.
        copies: the ranks that should hold the same values.
        name: name of the first tensor that differs.
        digest: digest of all tensors.
    """

    rank: int
    host: str
    copies: tuple[int, ...]
    name: str
    digest: int


def name_the_odd(found: Sequence[Copy]) -> Finding:
    """Return the ranks and hosts whose copies differ from most of the copies.

    Args:
        found: an entry for every rank whose copy differs from another one.
    """
    odd: list[Copy] = []
    for copies in dict.fromkeys(one.copies for one in found):
        alike = [one for one in found if one.copies == copies]
        ((digest, count), *others) = Counter(one.digest for one in alike).most_common()
        clear = not others or count > others[0][1]
        odd += [one for one in alike if one.digest != digest] if clear else alike
    listed = ", ".join(f"rank {one.rank} on {one.host}" for one in odd)
    name = odd[0].name
    if len(odd) == len(found):
        return Finding(f"copies of {name} differ between {listed}: one of them is faulty")
    hosts = short_names([one.host for one in odd])
    return Finding(f"{listed} has another {name} than its copies: its hardware is suspect", hosts)
