"""What one rank finds out for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


def from_first(work: Callable[[], T], group: ProcessGroup | None) -> T:
    """What the first rank's `work` returns, on every rank. Collective.

    Args:
        work: must not raise; what it returns must pickle.
        group: of all ranks, on the CPU; None in a lone process.
    """
    if group is None:
        return work()
    import torch.distributed as dist

    answer: list[T | None] = [work() if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(answer, src=dist.get_global_rank(group, 0), group=group)
    return answer[0]  # type: ignore[return-value]
