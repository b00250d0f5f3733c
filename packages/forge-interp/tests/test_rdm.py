import numpy as np
import pytest
import torch
from forge_interp.analysis.rdm import compute_rdm
from forge_interp.errors import InterpError

RANDOM = np.random.default_rng(0)
RESPONSES = RANDOM.normal(size=(9, 20)) + 1
PRECISION = np.linalg.inv(np.cov(RANDOM.normal(size=(20, 80))))


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


def test_rdm_refuses_what_it_cannot_do():
    with pytest.raises(InterpError, match="no precision"):
        compute_rdm(RESPONSES, metric="mahalanobis")
    with pytest.raises(InterpError, match="row 2 has no variance"):
        compute_rdm(np.where(np.arange(9)[:, None] == 2, 1.0, RESPONSES))


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


def test_rdm_refuses_bad_values_and_shapes():
    with pytest.raises(InterpError, match="responses holds 1 values"):
        compute_rdm(np.where(np.arange(180).reshape(9, 20) == 4, np.nan, RESPONSES))
    with pytest.raises(InterpError, match="2 rows; expected at least 3"):
        compute_rdm(RESPONSES[:2])
    with pytest.raises(InterpError, match=r"precision has shape \(3, 3\); expected \(20, 20\)"):
        compute_rdm(RESPONSES, metric="mahalanobis", precision=np.eye(3))
    with pytest.raises(InterpError, match="'chebyshev' with no precision"):
        compute_rdm(RESPONSES, metric="chebyshev")
