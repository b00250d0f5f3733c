import time
import tracemalloc

import numpy as np
import pytest
from forge_data.error import DataError
from forge_data.order.order import MIX_BLOCK, VERSION, Order, permute


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1000, 4096, 65537])
def test_permute_is_a_bijection(size: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, seed=7)), np.arange(size))


def test_permute_does_not_depend_on_what_is_asked_together() -> None:
    whole = permute(np.arange(1000), 1000, seed=3)
    assert np.array_equal(permute(np.arange(1000)[::-7].copy(), 1000, seed=3), whole[::-7])


def test_permute_is_another_one_for_another_seed() -> None:
    a, b = (permute(np.arange(10_000), 10_000, seed) for seed in (1, 2))
    assert np.mean(a == b) < 0.01


def _chi_squared_bounds(degrees: tuple[int, int]) -> tuple[float, float]:
    """The 1e-5 tails of chi-squared; Wilson and Hilferty 1931."""
    (low, high), z = ((df, 2 / (9 * df)) for df in degrees), 4.26
    return low[0] * (1 - low[1] - z * low[1] ** 0.5) ** 3, high[0] * (1 - high[1] + z * high[1] ** 0.5) ** 3


@pytest.mark.parametrize(
    ("size", "seeds"), [(4, 4000), (7, 4000), (10, 2000), (101, 300), (4096, 20), (50_000, 6), (10**6, 1)]
)
def test_permute_is_uniform_and_without_memory(size: int, seeds: int) -> None:
    """Chi-squared of parts of the places against parts of the values, and of neighbours."""
    place, bins = np.arange(size), min(size, 10)
    value = permute(np.tile(place, seeds), size, np.repeat(np.arange(seeds), size)).reshape(seeds, size)
    part = value * bins // size
    by_place = np.bincount((np.tile(place * bins // size, seeds) * bins + part.ravel()), minlength=bins**2)
    neighbours = np.bincount((part[:, :-1] * bins + part[:, 1:]).ravel(), minlength=bins**2)
    held = np.bincount(place * bins // size)
    pairs = np.outer(held, held) - np.diag(held)
    expected = np.outer(held, held) / size, pairs / size
    low, high = _chi_squared_bounds(((bins - 1) ** 2 - bins, bins**2 - 1))
    for counts, cells in zip((by_place, neighbours), expected, strict=True):
        cells, found = seeds * cells.ravel(), counts[cells.ravel() > 0]
        cells = cells[cells > 0]
        assert low < float(((found - cells) ** 2 / cells).sum()) < high


def test_order_is_the_one_of_its_version() -> None:
    """Another order for the same seed would silently change runs that go on; it needs another `VERSION`."""
    assert VERSION == 2
    permuted = [674, 783, 253, 671, 499, 804, 594, 719, 831, 461, 157, 223]
    assert permute(np.arange(12), 1000, seed=7).tolist() == permuted
    source, sample = Order(3, [50, 70], [0.4, 0.6]).locate(np.arange(5000, 5008))
    assert source.tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    assert sample.tolist() == [15, 15, 19, 25, 24, 26, 46, 33]


def test_order_serves_each_sample_once_an_epoch() -> None:
    order = Order(5, [701], [1.0])
    for epoch in range(3):
        source, sample = order.locate(np.arange(epoch * 701, (epoch + 1) * 701))
        assert not source.any()
        assert np.array_equal(np.sort(sample), np.arange(701))


def test_order_of_two_epochs_differs() -> None:
    _, sample = Order(5, [701], [1.0]).locate(np.arange(2 * 701))
    assert np.mean(sample[:701] == sample[701:]) < 0.02


def test_order_serves_each_sample_once_an_epoch_when_sources_are_mixed() -> None:
    sizes, weights = [500, 3000, 7001], [0.2, 0.3, 0.5]
    source, sample = Order(1, sizes, weights).locate(np.arange(5 * MIX_BLOCK + 17))
    for s, size in enumerate(sizes):
        mine = sample[source == s]
        for epoch in range(len(mine) // size):
            assert np.array_equal(np.sort(mine[epoch * size : (epoch + 1) * size]), np.arange(size))
        left = mine[len(mine) // size * size :]
        assert len(np.unique(left)) == len(left)


@pytest.mark.parametrize("weights", [[1, 1, 1], [0.1, 0.2, 0.7], [1000, 1, 3.7]])
def test_order_keeps_weights_within_one_sample_at_block_boundaries(weights: list[float]) -> None:
    blocks = 60
    source, _ = Order(0, [10**6] * 3, weights).locate(np.arange(blocks * MIX_BLOCK))
    share = np.asarray(weights) / sum(weights)
    counts = np.cumsum(np.eye(3)[source], axis=0)
    taken = np.arange(1, blocks * MIX_BLOCK + 1)[:, None] * share
    assert np.abs(counts - taken)[MIX_BLOCK - 1 :: MIX_BLOCK].max() < 1
    # In between it wanders like a shuffled block, not like independent draws.
    assert np.abs(counts - taken).max() < 200


def test_order_is_the_same_wherever_it_starts() -> None:
    order = Order(2, [100, 1000], [0.25, 0.75])
    whole = order.locate(np.arange(3 * MIX_BLOCK))
    for start in (0, 1, MIX_BLOCK - 1, MIX_BLOCK, 2 * MIX_BLOCK + 5):
        part = order.locate(np.arange(start, start + 50))
        assert np.array_equal(part[0], whole[0][start : start + 50])
        assert np.array_equal(part[1], whole[1][start : start + 50])


def test_order_needs_neither_time_nor_memory_for_ten_billion_samples() -> None:
    tracemalloc.start()
    start = time.perf_counter()
    order = Order(0, [10**10, 3 * 10**9], [0.6, 0.4])
    for first in (0, 10**8, 9 * 10**9, 10**12):
        source, sample = order.locate(np.arange(first, first + 1024))
        assert sample.max() < 10**10
        assert len(np.unique(source)) == 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.perf_counter() - start < 1
    assert peak < 4 << 20


def test_order_counts_epochs_as_it_serves_them() -> None:
    order = Order(2, [100, 1000], [0.25, 0.75])
    source, _ = order.locate(np.arange(10_000))
    counts = np.bincount(source)
    assert order.epochs(10_000) == [counts[0] / 100, counts[1] / 1000]


@pytest.mark.parametrize(("sizes", "weights"), [([0, 5], [1, 1]), ([5, 5], [1, 1e-4])])
def test_order_refuses_a_source_that_cannot_be_served(sizes: list[int], weights: list[float]) -> None:
    with pytest.raises(DataError, match=r"source [01]"):
        Order(0, sizes, weights)
