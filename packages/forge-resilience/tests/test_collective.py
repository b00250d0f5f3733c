"""Sums over ranks, played by one process; those of real ranks are in tests/distributed/test_check_sum.py."""

import pytest
import torch
import torch.distributed as dist
from forge_resilience import collective


@pytest.mark.parametrize("ranks", [2, 8192])
def test_right_sum_of_many_ranks_is_no_wrong_one(ranks, monkeypatch):
    monkeypatch.setattr(collective, "SIZE", 4)
    monkeypatch.setattr(collective, "REPEATS", 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group: ranks)
    current = [0]
    monkeypatch.setattr(dist, "get_rank", lambda group: current[0])
    given: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda mine, group: given.append(mine.clone()))
    for current[0] in range(ranks):
        collective.check_sum(None, torch.device("cpu"))  # type: ignore[arg-type]
    total = torch.zeros(4)
    for one in given:
        total += one
    monkeypatch.setattr(dist, "all_reduce", lambda mine, group: mine.copy_(total))
    assert collective.check_sum(None, torch.device("cpu")).wrong == 0  # type: ignore[arg-type]
    total[3] += 1
    assert collective.check_sum(None, torch.device("cpu")).wrong == 1  # type: ignore[arg-type]
