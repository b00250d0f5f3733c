import pytest
from forge_interp.errors import InterpError
from forge_interp.extraction.run.processes import Processes
from torch import nn

MODEL = nn.Linear(2, 2)


@pytest.mark.parametrize(("batches", "size"), [(0, 1), (1, 3), (7, 3), (8, 8), (100, 7)])
def test_shares_are_even_and_cover_all(batches: int, size: int):
    shares = [Processes(rank, size).share(batches) for rank in range(size)]
    shares = [(start, batches if stop is None else stop) for start, stop in shares]
    assert [n for start, stop in shares for n in range(start, stop)] == list(range(batches))
    sizes = [stop - start for start, stop in shares]
    assert max(sizes) - min(sizes) <= 1


def test_share_of_one_process_needs_no_length():
    assert Processes(0, 1).share(None) == (0, None)
    with pytest.raises(InterpError, match="for 2 processes"):
        Processes(0, 2).share(None)


@pytest.mark.parametrize(
    ("rank", "world_size", "text"),
    [(1, None, "expected both"), (None, 2, "expected both"), (2, 2, "rank is 2 of 2"), (-1, 2, "rank is -1")],
)
def test_processes_refuse_ranks_that_are_none(rank: int | None, world_size: int | None, text: str):
    with pytest.raises(InterpError, match=text):
        Processes.of(MODEL, rank, world_size, None, True)


def test_processes_alone_do_things_themselves():
    one = Processes.of(MODEL, None, None, None, True)
    assert (one.rank, one.size, one.group, one.in_step, one.is_first) == (0, 1, None, False, True)
    assert one.agree(lambda: {3: (1, 2)}) == {3: (1, 2)}
    done: list[int] = []
    one.together(lambda: done.append(1))
    assert done == [1]
