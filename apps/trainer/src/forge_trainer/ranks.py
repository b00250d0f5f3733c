"""Runs work that some ranks do while the others wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from forge_data.error import DataError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

LONGEST_WAIT_S = 1.0
"""The longest interval at which ranks tell each other that they still work."""


def from_first(work: Callable[[], T], group: ProcessGroup | None) -> T:
    """Run `work` on the first rank; return its result on every rank. Collective.

    Args:
        work: must not raise; what it returns must pickle.
        group: process group of all ranks, on the CPU; None in a single process.
    """
    if group is None:
        return work()
    import torch.distributed as dist

    answer: list[T | None] = [work() if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(answer, src=dist.get_global_rank(group, 0), group=group)
    return answer[0]  # type: ignore[return-value]


def keep_in_touch(
    work: Callable[[Callable[[], None]], T], group: ProcessGroup | None, on_progress: Callable[[], None]
) -> T:
    """Run `work` on every rank; return this rank's result when all are done. Collective.

    Work may take hours on some ranks: meanwhile all ranks exchange short messages, so that no collective
    waits longer than its timeout, and a signal is handled.

    Args:
        work: takes a function that it calls as it progresses; runs in a thread if there are several ranks.
        group: process group of all ranks, on the CPU; None in a single process.
        on_progress: called when the work of any rank has progressed.

    Raises:
        Exception: the error that `work` raised on this rank.
        DataError: `work` raised an error on another rank.
    """
    if group is None:
        return work(on_progress)
    import torch
    import torch.distributed as dist

    done: list[T] = []
    failed: list[Exception] = []
    steps = [0]

    def count() -> None:
        steps[0] += 1

    def run() -> None:
        try:
            done.append(work(count))
        except Exception as error:  # raised by the thread that waits
            failed.append(error)

    thread = threading.Thread(target=run, name="work", daemon=True)
    thread.start()
    wait, before = 0.01, -1
    while True:
        thread.join(wait)
        mine = failed[:]
        sums = torch.tensor([not (done or mine), len(mine), steps[0]], dtype=torch.int64)
        dist.all_reduce(sums, group=group)
        working, failures, total = sums.tolist()
        if failures:
            messages: list[str | None] = [None] * dist.get_world_size(group)
            dist.all_gather_object(messages, str(mine[0]) if mine else None, group=group)
            raise (
                mine[0] if mine else DataError(f"on another rank: {next(filter(None, messages), 'an error')}")
            )
        if not working:
            thread.join()
            return done[0]
        if total != before:
            on_progress()
        wait, before = min(2 * wait, LONGEST_WAIT_S), total
