import time
import tracemalloc

import numpy as np
import pytest
from forge_data.loading.batches import TrainBatches
from forge_data.order.order import Order
from forge_data.packing.packing import Packing, Sequences


class Virtual(Packing):
    """As many sequences as asked for; the first token is the number of the sequence."""

    max_tokens = 128

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def read(self, samples: np.ndarray) -> Sequences:
        return Sequences(samples[:, None] + np.arange(self.max_tokens + 1))


@pytest.mark.parametrize("first", [0, 10**8])
def test_first_batch_of_ten_billion_samples_is_near_and_small(first: int) -> None:
    tracemalloc.start()
    start = time.perf_counter()
    packings = {0: Virtual(10**10), 1: Virtual(3 * 10**9), 2: Virtual(10**6)}
    phases = [(5 * 10**7, [0.1, 0.8, 0.1])]
    order = Order(0, [len(p) for p in packings.values()], [0.6, 0.3, 0.1], phases)
    group = TrainBatches(packings, 8, order, first, 1024, 0, 8).group(0)
    taken, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert set(np.unique(group.source)) == {0, 1, 2} and group.rows[:, :, 0].max() > 10**9
    assert taken < 1 and peak < 100 << 20
