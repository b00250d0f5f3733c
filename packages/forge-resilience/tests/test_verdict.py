from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from forge_resilience.verdict import Verdict, agree


def test_agree_of_a_lone_process_is_its_own_verdict():
    assert [agree(v, None) for v in Verdict] == list(Verdict)


@pytest.mark.parametrize("first", Verdict)
@pytest.mark.parametrize("second", Verdict)
def test_agree_of_two_ranks_is_the_gravest(first, second):
    store = dist.HashStore()

    def rank(number, verdict):
        group = dist.ProcessGroupGloo(dist.PrefixStore("agree", store), number, 2, timedelta(seconds=60))
        return agree(verdict, group)

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(rank, (0, 1), (first, second)))
    assert answers == [max(first, second)] * 2
