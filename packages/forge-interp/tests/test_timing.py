import numpy as np
import pytest
import torch
from forge_interp.encoding_models import timing
from forge_interp.encoding_models.timing import fir_delays, resample
from forge_interp.errors import InterpError


def test_fir_delays_equal_a_loop_and_do_not_cross_runs():
    x = torch.randn(11, 2, dtype=torch.float64)
    runs = np.array([3] * 6 + [1] * 5)
    found = fir_delays(x, (0, 2, -1, 9), runs)
    for t in range(11):
        for i, delay in enumerate((0, 2, -1, 9)):
            source = t - delay
            inside = 0 <= source < 11 and runs[source] == runs[t]
            expected = x[source] if inside else torch.zeros(2, dtype=torch.float64)
            assert torch.equal(found[t, 2 * i : 2 * i + 2], expected)


def test_fir_delays_refuse_broken_runs():
    with pytest.raises(InterpError, match="not contiguous"):
        fir_delays(torch.zeros(3, 1), (1,), [0, 1, 0])
    with pytest.raises(InterpError, match="delays is empty"):
        fir_delays(torch.zeros(3, 1), ())
    with pytest.raises(InterpError, match="one label per row"):
        fir_delays(torch.zeros(3, 1), (1,), [0, 1])


def test_resample_mean_averages_the_events_of_each_interval():
    features = np.array([[1.0], [3.0], [10.0], [7.0]])
    found = resample(features, [0.0, 1.9, 2.0, 6.5], [0, 2, 4, 6], method="mean")
    np.testing.assert_allclose(found[:, 0], [2, 10, 0, 7])


def test_resample_lanczos_keeps_slow_signals_and_drops_fast_ones():
    times = np.arange(0, 100, 0.1)
    at = np.arange(20, 80, 2.0)
    slow, fast = np.sin(2 * np.pi * times / 25), np.sin(2 * np.pi * times / 0.9)
    found = resample(np.stack([slow, fast], axis=1), times, at).numpy() * 0.1 / 2.0
    np.testing.assert_allclose(found[:, 0], np.sin(2 * np.pi * at / 25), atol=0.03)
    assert np.abs(found[:, 1]).max() < 0.02


def test_resample_refuses_uneven_scans():
    with pytest.raises(InterpError, match="evenly spaced"):
        resample(np.zeros((2, 1)), [0, 1], [0, 1, 3])
    with pytest.raises(InterpError, match="'linear'"):
        resample(np.zeros((2, 1)), [0, 1], [0, 1], method="linear")


def lanczos(x: np.ndarray, lobes: int) -> np.ndarray:
    """By the definition, sin(pi x) sin(pi x / lobes) lobes / (pi x)^2."""
    safe = np.where(x == 0, 1, x)
    value = lobes * np.sin(np.pi * safe) * np.sin(np.pi * safe / lobes) / (np.pi * safe) ** 2
    return np.where(x == 0, 1, np.where(np.abs(x) < lobes, value, 0))


@pytest.mark.parametrize("lobes", [1, 3])
def test_resample_lanczos_equals_the_definition_in_blocks_too(lobes, monkeypatch):
    random = np.random.default_rng(0)
    x, times, at = random.normal(size=(200, 3)), np.sort(random.uniform(0, 60, 200)), np.arange(0, 60, 2.0)
    times[3] = at[5]
    expected = lanczos((at[:, None] - times) / 2, lobes) @ x
    np.testing.assert_allclose(resample(x, times, at, lobes=lobes), expected, atol=1e-12)
    for elements in (1, 999):
        monkeypatch.setattr(timing, "_KERNEL_ELEMENTS", elements)
        np.testing.assert_allclose(resample(x, times, at, lobes=lobes), expected, atol=1e-12)


@pytest.mark.parametrize("start", [0.0, 100.0])
@pytest.mark.parametrize("step", [0.1, 0.72])
def test_resample_mean_gives_an_event_at_a_scan_to_that_scan(start, step):
    at, x = start + np.arange(40) * step, np.arange(40.0)
    np.testing.assert_array_equal(resample(x, at, at, method="mean")[:, 0], x)


def test_resample_mean_leaves_out_events_before_the_first_and_after_the_last_scan():
    found = resample(np.array([5.0, 1.0, 2.0, 7.0]), [-0.1, 0.0, 5.99, 6.0], [0, 2, 4], method="mean")
    np.testing.assert_array_equal(found[:, 0], [1, 0, 2])


def test_resample_refuses_bad_values_and_options():
    with pytest.raises(InterpError, match="times holds 1 values"):
        resample(np.ones((3, 1)), [0, np.nan, 1], [0, 1, 2])
    with pytest.raises(InterpError, match="x holds 1 values"):
        resample(np.array([1.0, np.nan, 1.0]), [0, 10, 1], [0, 1, 2])
    with pytest.raises(InterpError, match="lobes 0"):
        resample(np.ones((3, 1)), [0, 1, 2], [0, 1, 2], lobes=0)
    with pytest.raises(InterpError, match="rows are"):
        resample(np.ones((3, 1)), [0, 1], [0, 1, 2])
    for at in ([0], [2, 1, 0], [0, np.nan, 2]):
        with pytest.raises(InterpError, match="evenly spaced and rising"):
            resample(np.ones((3, 1)), [0, 1, 2], at)
