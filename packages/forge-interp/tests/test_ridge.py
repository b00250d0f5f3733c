import numpy as np
import pytest
import torch
from forge_interp.analysis.accumulate import Moments
from forge_interp.analysis.ridge import RidgePath, fit_path, fit_ridge, ridge_from_moments
from forge_interp.errors import InterpError

ALPHAS = (0.01, 1.0, 30.0, 1000.0)


def make_data(n: int = 60, d: int = 10) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(n, d)) * np.logspace(0, 1, d) + 5
    y = x @ random.normal(size=(d, 3)) * [1, 0.1, 0] + 3 * random.normal(size=(n, 3)) - 7
    return x, y


@pytest.mark.parametrize("shape", [(60, 10), (30, 45)])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_ridge_equals_scikit_learn(shape, alpha):
    linear = pytest.importorskip("sklearn.linear_model")
    x, y = make_data(*shape)
    expected = linear.Ridge(alpha=alpha).fit(x, y)
    found = fit_ridge(x, y, alphas=[alpha])
    np.testing.assert_allclose(found.weights.T, expected.coef_, atol=1e-6)
    np.testing.assert_allclose(found.predict(x), expected.predict(x), atol=1e-6)


def test_ridge_chooses_per_target_as_scikit_learn_leave_one_out():
    linear = pytest.importorskip("sklearn.linear_model")
    x, y = make_data(40, 25)
    expected = linear.RidgeCV(ALPHAS, alpha_per_target=True, store_cv_results=True).fit(x, y)
    found = fit_ridge(x, y, alphas=ALPHAS)
    assert found.errors is not None
    np.testing.assert_array_equal(found.alpha, expected.alpha_)
    np.testing.assert_allclose(found.errors, expected.cv_results_.mean(0).T, rtol=1e-6)
    np.testing.assert_allclose(found.weights.T, expected.coef_, atol=1e-6)
    assert len(set(found.alpha.tolist())) > 1


def test_leave_one_out_equals_refitting_without_each_sample():
    x, y = (torch.as_tensor(a) for a in make_data(20, 4))
    expected = []
    for i in range(20):
        rest = torch.arange(20) != i
        fit = fit_path(RidgePath(x[rest]), y[rest], torch.full((3,), 2.0, dtype=torch.float64))
        expected.append(y[i] - fit.predict(x[i : i + 1])[0])
    torch.testing.assert_close(RidgePath(x).leave_one_out(y, 2.0), torch.stack(expected))


def test_path_predicts_every_alpha_as_its_own_fit():
    x, y = (torch.as_tensor(a) for a in make_data())
    path = RidgePath(x)
    found = path.predict(x[:7], path.project(y), ALPHAS) + y.mean(0)
    expected = torch.stack([fit_ridge(x, y, alphas=[alpha]).predict(x[:7]) for alpha in ALPHAS])
    torch.testing.assert_close(found, expected)


def test_ridge_shares_one_alpha_when_asked():
    x, y = make_data(40, 25)
    found = fit_ridge(x, y, alphas=ALPHAS, per_target=False)
    assert found.errors is not None
    assert set(found.alpha.tolist()) == {ALPHAS[int(found.errors.mean(1).argmin())]}


def test_ridge_from_moments_equals_ridge_on_all_rows():
    x, y = make_data()
    moments = Moments({"x": 10, "y": 3}, between=(["x"], ["y"]))
    for i in range(0, 60, 13):
        moments.update({"x": x[i : i + 13], "y": y[i : i + 13]})
    found, expected = ridge_from_moments(moments, "x", "y", 3.0), fit_ridge(x, y, alphas=[3.0])
    torch.testing.assert_close(found.weights, expected.weights)
    torch.testing.assert_close(found.intercept, expected.intercept)


def test_ridge_ignores_features_that_never_vary():
    x, y = make_data()
    padded = np.concatenate([x, np.full((60, 2), 9.0)], axis=1)
    found = fit_ridge(padded, y, alphas=[1.0])
    torch.testing.assert_close(found.weights[:10], fit_ridge(x, y, alphas=[1.0]).weights)
    assert found.weights[10:].abs().max() < 1e-9


def test_ridge_refuses_bad_input():
    x, y = make_data()
    with pytest.raises(InterpError, match="alphas are"):
        fit_ridge(x, y, alphas=[0.0])
    with pytest.raises(InterpError, match="rows are"):
        fit_ridge(x, y[:-1])
    with pytest.raises(InterpError, match="y holds 1 values"):
        fit_ridge(x, np.where(np.arange(180).reshape(60, 3) == 4, np.nan, y))
