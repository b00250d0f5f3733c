import multiprocessing
import os
import threading
import time
from contextlib import nullcontext
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forge_parallel import testing
from forge_parallel.testing import RankError, assert_matches_single, run_ranks

pytestmark = pytest.mark.dist


def place(extra: str) -> tuple:
    total = torch.ones(1)
    dist.all_reduce(total)
    return os.environ["RANK"], os.environ["WORLD_SIZE"], total.item(), extra, os.getpid()


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the reason")
    dist.barrier()


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(41)
    dist.barrier()


def hang_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def look_for_the_other() -> None:
    """The first rank returns at once; the other looks whether it is still connected."""
    if dist.get_rank() == 1:
        time.sleep(0.5)
        dist.isend(torch.ones(1), 0)


def unpicklable() -> object:
    return lambda: None


def curve(offset: float) -> dict[str, list[float]]:
    return {"loss": [1.0, 2.0 + offset * (dist.get_world_size() > 1)]}


def test_run_ranks_returns_by_rank_with_a_group_and_environment():
    results = run_ranks(place, 2, "x")
    assert [r[:4] for r in results] == [("0", "2", 2.0, "x"), ("1", "2", 2.0, "x")]


def test_run_ranks_reuses_its_processes():
    first, again = run_ranks(place, 2, ""), run_ranks(place, 2, "")
    assert [r[4] for r in first] == [r[4] for r in again]


def test_run_ranks_shows_the_traceback_of_the_rank_that_raised():
    with pytest.raises(RankError, match=r"(?s)rank 1: .*fail_on_one.*KeyError: 'the reason'"):
        run_ranks(fail_on_one, 2)
    assert run_ranks(place, 2, "")[1][2] == 2.0


def test_run_ranks_names_the_rank_that_died_and_recovers():
    with pytest.raises(RankError, match=r"rank 1: the process died, exit code 41"):
        run_ranks(die_on_one, 2)
    assert run_ranks(place, 2, "")[1][2] == 2.0


def test_run_ranks_names_the_rank_that_hangs_and_recovers():
    with pytest.raises(RankError, match=r"1 of 2 ranks failed\n-- rank 1: did not answer in time"):
        run_ranks(hang_on_one, 2, timeout_s=1)
    assert run_ranks(place, 2, "")[1][2] == 2.0


def test_run_ranks_lets_no_rank_leave_before_the_others():
    run_ranks(look_for_the_other, 2)


def test_run_ranks_says_why_a_result_does_not_come_back():
    with pytest.raises(RankError, match="unpicklable"):
        run_ranks(unpicklable, 1)


def test_run_ranks_refuses_nested_functions():
    with pytest.raises(TypeError, match="nested"):
        run_ranks(lambda: None, 1)


def test_assert_matches_single_names_curve_rank_and_step():
    assert_matches_single(curve, 2, 1e-7, rtol={"loss": 1e-6})
    with pytest.raises(AssertionError, match="loss of rank 0 at step 1"):
        assert_matches_single(curve, 2, 1e-3, rtol={"loss": 1e-6})


def done() -> str:
    return "done"


class LateProcess:
    """A thread in place of a process; it starts a second late."""

    pid = 0

    def __init__(self, target, args, daemon) -> None:
        pipe = Connection(os.dup(args[0].fileno()))  # the pool closes its own
        self._serve = lambda: (time.sleep(1), target(pipe))

    def start(self) -> None:
        threading.Thread(target=self._serve, daemon=True).start()

    def is_alive(self) -> bool:
        return True

    def kill(self) -> None:
        pass

    def join(self) -> None:
        pass


def test_the_start_of_the_processes_does_not_count_as_time_of_the_job(monkeypatch):
    monkeypatch.setattr(testing, "_group", lambda *place: nullcontext())
    pool = testing._Pool()
    pool._context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=LateProcess)
    try:
        assert pool.run(done, 2, (), timeout_s=0.5) == ["done", "done"]
    finally:
        pool.close()
