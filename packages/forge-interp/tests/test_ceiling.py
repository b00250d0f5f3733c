import itertools

import numpy as np
import pytest
import torch
from forge_interp.encoding_models.ceiling import Ceiling, pearson, repeat_ceiling, split_half_ceiling
from forge_interp.errors import InterpError


def simulate(reliability: np.ndarray, repeats: int, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Signal of variance 1 and noise such that the mean of the repeats has the given reliability."""
    random = np.random.default_rng(seed)
    signal = random.normal(size=(n, len(reliability)))
    noise = np.sqrt(repeats * (1 - reliability) / reliability)
    return signal, signal + noise * random.normal(size=(repeats, *signal.shape))


@pytest.mark.parametrize("estimate", [split_half_ceiling, repeat_ceiling])
@pytest.mark.parametrize("repeats", [2, 5, 8])
def test_ceiling_recovers_the_true_reliability_within_two_standard_errors(estimate, repeats):
    for truth in (0.2, 0.5, 0.9):
        targets = np.full(300, truth)
        found = estimate(simulate(targets, repeats, 400)[1]).reliability
        error = found.std(ddof=1) / 300**0.5
        assert abs(found.mean() - truth) < 2 * error + 0.003
        assert error < 0.01


@pytest.mark.parametrize("estimate", [split_half_ceiling, repeat_ceiling])
def test_ceiling_is_the_correlation_that_the_true_signal_reaches(estimate):
    truth = np.linspace(0.25, 0.95, 30)
    signal, recordings = simulate(truth, 6, 4000)
    reached = pearson(torch.as_tensor(signal), torch.as_tensor(recordings.mean(0))).numpy()
    np.testing.assert_allclose(estimate(recordings).normalize(reached), 1, atol=0.05)


def test_ceiling_at_another_number_of_repeats_equals_an_estimate_there():
    truth = np.full(40, 0.8)
    _, recordings = simulate(truth, 8, 4000)
    single = repeat_ceiling(recordings).at(1).reliability
    noise = 8 * 0.2 / 0.8
    assert single.mean() == pytest.approx(1 / (1 + noise), abs=0.01)
    assert repeat_ceiling(recordings[:4]).reliability.mean() == pytest.approx(
        repeat_ceiling(recordings).at(4).reliability.mean(), abs=0.01
    )


def test_normalize_never_divides_by_a_ceiling_below_the_threshold():
    ceiling = Ceiling(np.array([0.81, 0.0099, 0.0, -0.5]), 2, "given")
    found = ceiling.normalize(np.array([0.45, 0.05, 0.05, 0.05]))
    assert found[0] == pytest.approx(0.5)
    assert np.isnan(found[1:]).all()
    with pytest.raises(InterpError, match="min_r is 0"):
        ceiling.normalize(np.zeros(4), min_r=0)


def test_split_half_of_two_repeats_equals_the_closed_form():
    _, recordings = simulate(np.array([0.5, 0.7]), 2, 100)
    half = pearson(*(torch.as_tensor(x) for x in recordings)).numpy()
    np.testing.assert_allclose(split_half_ceiling(recordings).reliability, 2 * half / (1 + half))


def test_ceiling_steps_up_no_negative_estimate():
    found = split_half_ceiling(np.array([[[1.0], [2], [3]], [[3.0], [2], [1]]]))
    assert found.reliability.item() == pytest.approx(-1)
    assert found.at(50).r.item() == 0


def test_pearson_equals_numpy_and_is_zero_for_a_constant():
    a, b = torch.randn(30, 2, dtype=torch.float64), torch.randn(30, 2, dtype=torch.float64)
    a[:, 1] = 3.0
    expected = np.corrcoef(a[:, 0], b[:, 0])[0, 1]
    np.testing.assert_allclose(pearson(a, b), [expected, 0.0], atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 10, 2), (4, 2, 2), (10, 2)])
def test_ceilings_refuse_too_few_repeats_or_samples(shape):
    for estimate in (split_half_ceiling, repeat_ceiling):
        with pytest.raises(InterpError, match="expected \\[repeats, samples, targets\\]"):
            estimate(np.zeros(shape))


@pytest.mark.parametrize("repeats", [3, 4, 5, 6])
def test_split_half_averages_over_every_split_where_those_are_few(repeats):
    _, recordings = simulate(np.array([0.3, 0.8]), repeats, 50)
    half, everything = repeats // 2, set(range(repeats))
    halves = {
        frozenset((first, second))
        for first in itertools.combinations(range(repeats), half)
        for second in itertools.combinations(sorted(everything - set(first)), half)
    }
    found = split_half_ceiling(recordings, num_splits=len(halves), seed=1)
    mean = np.zeros(2)
    for first, second in halves:
        means = (recordings[list(part)].mean(0) for part in (first, second))
        mean += pearson(*(torch.as_tensor(x) for x in means)).numpy() / len(halves)
    factor = repeats / half
    np.testing.assert_allclose(found.reliability, factor * mean / (1 + (factor - 1) * mean), rtol=1e-12)
    assert not np.allclose(split_half_ceiling(recordings, num_splits=1).reliability, found.reliability)


def test_split_half_draws_as_many_splits_as_asked_where_there_are_more():
    _, recordings = simulate(np.full(3, 0.5), 8, 60)
    few, again, many = (split_half_ceiling(recordings, num_splits=k, seed=3) for k in (20, 20, 34))
    np.testing.assert_array_equal(few.reliability, again.reliability)
    assert (few.reliability != many.reliability).all()
    every = split_half_ceiling(recordings, num_splits=35)
    np.testing.assert_allclose(every.reliability, many.reliability, atol=0.05)
    np.testing.assert_array_equal(
        every.reliability, split_half_ceiling(recordings, num_splits=99, seed=8).reliability
    )


def test_repeat_ceiling_equals_the_signal_power_of_sahani_and_linden():
    _, recordings = simulate(np.array([0.3, 0.8]), 5, 80)
    of_mean, of_each = recordings.mean(0).var(0, ddof=1), recordings.var(1, ddof=1).mean(0)
    expected = (5 * of_mean - of_each) / 4 / of_mean
    np.testing.assert_allclose(repeat_ceiling(recordings).reliability, expected, rtol=1e-12)


@pytest.mark.parametrize("estimate", [split_half_ceiling, repeat_ceiling])
def test_ceiling_does_not_change_with_a_baseline_of_each_repeat(estimate):
    _, recordings = simulate(np.array([0.3, 0.8]), 6, 80)
    moved = recordings + 10 * np.arange(6)[:, None, None]
    np.testing.assert_allclose(estimate(moved).reliability, estimate(recordings).reliability, rtol=1e-9)


def test_ceiling_of_a_constant_target_divides_nothing():
    recordings = np.full((4, 51, 2), 0.1)
    recordings[:, :, 1] = np.random.default_rng(0).normal(size=(4, 51))
    halves, powers = split_half_ceiling(recordings), repeat_ceiling(recordings)
    assert halves.reliability[0] == 0 and np.isnan(powers.reliability[0])
    for ceiling in (halves, powers):
        assert np.isnan(ceiling.normalize(np.zeros(2))[0])
        assert ceiling.reliability[1] < 1


def test_ceilings_take_a_read_only_map_in_float32_and_refuse_nan(tmp_path):
    _, recordings = simulate(np.array([0.5, 0.7]), 4, 60)
    np.save(tmp_path / "y.npy", recordings.astype(np.float32))
    mapped = np.load(tmp_path / "y.npy", mmap_mode="r")
    recordings[2, 3, 1] = np.nan
    for estimate in (split_half_ceiling, repeat_ceiling):
        assert estimate(mapped).reliability.dtype == np.float64
        with pytest.raises(InterpError, match="repeats holds 1 values"):
            estimate(recordings)


def test_ceiling_refuses_no_split_and_no_repeat():
    with pytest.raises(InterpError, match="num_splits is 0"):
        split_half_ceiling(np.zeros((2, 5, 1)), num_splits=0)
    with pytest.raises(InterpError, match="num_repeats is 0"):
        repeat_ceiling(simulate(np.array([0.5]), 2, 20)[1]).at(0)
