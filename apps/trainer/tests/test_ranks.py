"""Ranks that wait for one that works."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from forge_data.error import DataError
from forge_parallel.testing import run_ranks
from forge_trainer import ranks
from forge_trainer.ranks import keep_in_touch


def _waits(seconds, touch):
    """Whether ranks whose collectives wait for a second outlast work of the first that takes longer."""
    ranks.LONGEST_WAIT_S = 0.1
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    got_on = []

    def work(count):
        for _ in range(10 if dist.get_rank() == 0 else 0):
            time.sleep(seconds / 10)
            count()
        return dist.get_rank() * 10

    if touch:
        return keep_in_touch(work, group, lambda: got_on.append(time.monotonic())), len(got_on)
    work(lambda: None)
    try:
        dist.barrier(group)
    except RuntimeError:
        return "gave up"


@pytest.mark.dist
def test_ranks_wait_for_work_longer_than_a_collective_may():
    (first, ticks), (second, others) = run_ranks(_waits, 2, 2.5, True)
    assert (first, second) == (0, 10) and ticks >= 5 and others >= 5
    assert run_ranks(_waits, 2, 2.5, False)[1] == "gave up"


def _fails(where):
    def work(count):
        if dist.get_rank() == where:
            raise DataError("no such text")
        time.sleep(30)

    try:
        return keep_in_touch(work, dist.group.WORLD, lambda: None)
    except DataError as error:
        return str(error)


@pytest.mark.dist
def test_error_of_one_rank_ends_all_at_once():
    start = time.monotonic()
    assert run_ranks(_fails, 2, 1) == ["on another rank: no such text", "no such text"]
    assert time.monotonic() - start < 20


def test_lone_process_works_by_itself():
    got_on = []
    assert keep_in_touch(lambda count: [count(), 7][1], None, lambda: got_on.append(1)) == 7
    assert got_on == [1]
