import numpy as np
import pytest
import torch
from forge_interp.analysis.rdm import compute_rdm, crossnobis, noise_precision
from forge_interp.errors import InterpError

RANDOM = np.random.default_rng(0)
RESPONSES = RANDOM.normal(size=(9, 20)) + 1
PRECISION = noise_precision(RANDOM.normal(size=(80, 20)) @ RANDOM.normal(size=(20, 20)))


def brute(metric: str, a: np.ndarray, b: np.ndarray) -> float:
    if metric == "correlation":
        return 1 - np.corrcoef(a, b)[0, 1]
    if metric == "cosine":
        return float(1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    precision = PRECISION if metric == "mahalanobis" else np.eye(20)
    return float((a - b) @ precision @ (a - b) / 20)


@pytest.mark.parametrize("metric", ["correlation", "cosine", "euclidean", "mahalanobis"])
def test_rdm_equals_the_definition_for_each_pair(metric):
    found = compute_rdm(RESPONSES, metric=metric, precision=PRECISION if metric == "mahalanobis" else None)
    pairs = [(i, j) for i in range(9) for j in range(i + 1, 9)]
    expected = [brute(metric, RESPONSES[i], RESPONSES[j]) for i, j in pairs]
    np.testing.assert_allclose(found, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("metric", ["correlation", "euclidean", "mahalanobis"])
def test_rdm_equals_rsatoolbox(metric):
    toolbox = pytest.importorskip("rsatoolbox", exc_type=ImportError)
    noise = PRECISION if metric == "mahalanobis" else None
    expected = toolbox.rdm.calc_rdm(toolbox.data.Dataset(RESPONSES), method=metric, noise=noise)
    found = compute_rdm(torch.from_numpy(RESPONSES), metric=metric, precision=noise)
    np.testing.assert_allclose(found, expected.dissimilarities[0], atol=1e-8)


def make_runs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    responses = np.random.default_rng(1).normal(size=(40, 20))
    return responses, np.tile(np.arange(5), 8), np.repeat(np.arange(4), 10)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_crossnobis_equals_rsatoolbox():
    toolbox = pytest.importorskip("rsatoolbox", exc_type=ImportError)
    responses, conditions, folds = make_runs()
    data = toolbox.data.Dataset(responses, obs_descriptors={"condition": conditions, "run": folds})
    expected = toolbox.rdm.calc_rdm(
        data, method="crossnobis", descriptor="condition", cv_descriptor="run", noise=PRECISION
    )
    found = crossnobis(responses, conditions, folds, precision=PRECISION)
    np.testing.assert_allclose(found, expected.dissimilarities[0], atol=1e-8)


def test_crossnobis_has_no_bias_from_noise_and_the_plain_distance_has():
    random = np.random.default_rng(0)
    responses = random.normal(size=(4 * 60, 2000))
    conditions, folds = np.tile(np.arange(4), 60), np.repeat(np.arange(6), 40)
    crossed = crossnobis(responses, conditions, folds)
    plain = compute_rdm(np.stack([responses[conditions == c].mean(0) for c in range(4)]), metric="euclidean")
    assert abs(crossed.mean()) < 0.003
    assert plain.mean() == pytest.approx(2 / 60, abs=0.005)


def test_noise_precision_equals_the_formula_entry_by_entry():
    x = np.random.default_rng(0).normal(size=(25, 6)) @ np.random.default_rng(1).normal(size=(6, 6))
    centred = x - x.mean(0)
    z = centred / centred.std(0, ddof=1)
    top = bottom = 0.0
    for i in range(6):
        for j in range(6):
            if i != j:
                w = z[:, i] * z[:, j]
                top += 25 / 24**3 * np.square(w - w.mean()).sum()
                bottom += (25 / 24 * w.mean()) ** 2
    covariance = np.cov(x, rowvar=False)
    shrunk = covariance * np.where(np.eye(6, dtype=bool), 1, 1 - top / bottom)
    np.testing.assert_allclose(noise_precision(x), np.linalg.inv(shrunk), rtol=1e-9)


def test_rdm_and_crossnobis_refuse_what_they_cannot_do():
    with pytest.raises(InterpError, match="no precision"):
        compute_rdm(RESPONSES, metric="mahalanobis")
    with pytest.raises(InterpError, match="row 2 has no variance"):
        compute_rdm(np.where(np.arange(9)[:, None] == 2, 1.0, RESPONSES))
    responses, conditions, _ = make_runs()
    with pytest.raises(InterpError, match="at least two"):
        crossnobis(responses, conditions, np.zeros(40))
    with pytest.raises(InterpError, match="lack measurements"):
        crossnobis(responses, conditions, conditions)


@pytest.mark.parametrize("constant", [1.0, 0.1, 1e6 + 0.1])
def test_rdm_refuses_a_row_that_is_constant_up_to_rounding(constant):
    rows = np.where(np.arange(9)[:, None] == 2, constant, RESPONSES)
    with pytest.raises(InterpError, match="row 2 has no variance"):
        compute_rdm(rows)
    assert np.isfinite(compute_rdm(rows, metric="cosine")).all()
    with pytest.raises(InterpError, match="row 2 has no variance"):
        compute_rdm(np.where(np.arange(9)[:, None] == 2, 0.0, RESPONSES), metric="cosine")


def test_rdm_of_equal_rows_leaves_no_range_by_rounding():
    squareform = pytest.importorskip("scipy.spatial.distance").squareform
    rows = np.concatenate([RESPONSES, RESPONSES, -RESPONSES])
    for metric, largest in (("correlation", 2), ("cosine", 2), ("euclidean", np.inf)):
        found = squareform(compute_rdm(rows, metric=metric))
        assert found.min() >= 0 and found.max() <= largest
        np.testing.assert_allclose(np.diag(found, 9)[:9], 0, atol=1e-15)
        assert compute_rdm(np.concatenate([RESPONSES, (1 + 1e-10) * RESPONSES]), metric=metric).min() >= 0


@pytest.mark.parametrize("metric", ["correlation", "euclidean", "mahalanobis"])
def test_rdm_keeps_its_digits_far_from_zero(metric):
    precision = PRECISION if metric == "mahalanobis" else None
    found = compute_rdm(RESPONSES + 1e6, metric=metric, precision=precision)
    np.testing.assert_allclose(found, compute_rdm(RESPONSES, metric=metric, precision=precision), rtol=1e-7)


def test_crossnobis_keeps_its_digits_far_from_zero():
    responses, conditions, folds = make_runs()
    found = crossnobis(responses + 1e6, conditions, folds)
    np.testing.assert_allclose(found, crossnobis(responses, conditions, folds), atol=1e-8)


def test_crossnobis_equals_the_definition_where_conditions_are_uneven():
    responses, conditions, folds = make_runs()
    keep = np.arange(40) != 7
    x, c, f = responses[keep], conditions[keep], folds[keep]
    expected = []
    for a in range(5):
        for b in range(a + 1, 5):
            parts = [
                (x[(c == a) & (f == k)].mean(0) - x[(c == b) & (f == k)].mean(0))
                @ PRECISION
                @ (x[(c == a) & (f != k)].mean(0) - x[(c == b) & (f != k)].mean(0))
                for k in range(4)
            ]
            expected.append(np.mean(parts) / 20)
    np.testing.assert_allclose(crossnobis(x, c, f, precision=PRECISION), expected, rtol=1e-10)


def test_noise_precision_scales_with_the_degrees_of_freedom():
    x = np.random.default_rng(0).normal(size=(25, 6))
    np.testing.assert_allclose(noise_precision(x, dof=12), noise_precision(x) * 12 / 24, rtol=1e-12)
    with pytest.raises(InterpError, match="dof is 0"):
        noise_precision(x, dof=0)


def test_noise_precision_exists_with_more_channels_than_measurements_or_one():
    x = np.random.default_rng(0).normal(size=(10, 50))
    values = np.linalg.eigvalsh(noise_precision(x))
    assert 0 < values[0] < values[-1] < 1000
    np.testing.assert_allclose(noise_precision(x[:, :1]), 1 / x[:, :1].var(ddof=1))


@pytest.mark.parametrize("jitter", [0.0, 1e-3])
def test_noise_precision_of_channels_without_correlation_is_that_of_each(jitter):
    signs = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(1, 8)] for i in range(8)])
    x = signs * np.arange(1, 8) + jitter * np.random.default_rng(0).normal(size=(8, 7))
    np.testing.assert_allclose(noise_precision(x), np.diag(1 / x.var(0, ddof=1)), atol=1e-12)


def test_rdm_and_noise_refuse_bad_values_and_shapes():
    for channel in (0.1, 3.0):
        with pytest.raises(InterpError, match="channel 1 never varies"):
            noise_precision(np.where(np.arange(20) == 1, channel, RESPONSES))
    with pytest.raises(InterpError, match="responses holds 1 values"):
        compute_rdm(np.where(np.arange(180).reshape(9, 20) == 4, np.nan, RESPONSES))
    with pytest.raises(InterpError, match="2 rows; expected at least 3"):
        compute_rdm(RESPONSES[:2])
    with pytest.raises(InterpError, match=r"precision has shape \(3, 3\); expected \(20, 20\)"):
        compute_rdm(RESPONSES, metric="mahalanobis", precision=np.eye(3))
    with pytest.raises(InterpError, match="'chebyshev' with no precision"):
        compute_rdm(RESPONSES, metric="chebyshev")
    responses, conditions, folds = make_runs()
    with pytest.raises(InterpError, match="expected one per row"):
        crossnobis(responses, conditions[:-1], folds)
