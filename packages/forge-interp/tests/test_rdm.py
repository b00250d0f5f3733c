import numpy as np
import pytest
import torch
from forge_interp.analysis.rdm import compute_rdm, crossnobis, noise_precision, num_conditions, square
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


def test_square_round_trips():
    vector = compute_rdm(RESPONSES)
    matrix = square(vector)
    assert np.array_equal(matrix, matrix.T)
    assert np.array_equal(matrix[np.triu_indices(9, 1)], vector)


def test_rdm_and_crossnobis_refuse_what_they_cannot_do():
    with pytest.raises(InterpError, match="no precision"):
        compute_rdm(RESPONSES, metric="mahalanobis")
    with pytest.raises(InterpError, match="row 2 has no variance"):
        compute_rdm(np.where(np.arange(9)[:, None] == 2, 1.0, RESPONSES))
    with pytest.raises(InterpError, match="an RDM has 7 entries"):
        num_conditions(7)
    responses, conditions, _ = make_runs()
    with pytest.raises(InterpError, match="at least two"):
        crossnobis(responses, conditions, np.zeros(40))
    with pytest.raises(InterpError, match="lack measurements"):
        crossnobis(responses, conditions, conditions)
