"""Does a sum over ranks give the right numbers, and how long does it take?"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

SIZE, PERIOD, REPEATS = 2**16, 61, 3
"""Numbers that are summed, the distance at which they repeat, and how often; some milliseconds in all."""


class Checked(NamedTuple):
    """The result of a check on one rank.

    Attributes:
        seconds: duration of the fastest sum.
        wrong: count of numbers that differ from the known result.
    """

    seconds: float
    wrong: int


def check_sum(group: ProcessGroup, device: torch.device) -> Checked:
    """Sum numbers over a group whose sum is known exactly. Waits for the device. Collective.

    Args:
        group: the group of the ranks.
        device: the device of this rank's numbers; decides the backend (NCCL on GPUs, gloo on CPUs).
    """
    import torch.distributed as dist

    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    numbers = (torch.arange(SIZE, device=device) % PERIOD).float()
    # whole numbers, exact in float32 up to 100,000 ranks, in whatever order they are summed
    expected = numbers * ranks + sum(other % PERIOD for other in range(ranks))
    took: list[float] = []
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(REPEATS):  # the first one waits for the slowest rank
        mine = numbers + rank % PERIOD
        mine[0].item()
        begin = time.perf_counter()
        dist.all_reduce(mine, group=group)
        mine[0].item()
        took.append(time.perf_counter() - begin)
        wrong += (mine != expected).sum()
    return Checked(min(took), int(wrong.item()))
