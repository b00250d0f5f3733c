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


@pytest.mark.parametrize("shape", [(100, 6), (20, 40)])
@pytest.mark.parametrize("factor", [1e3, 1e6, 1e8])
def test_ridge_equals_scikit_learn_where_features_are_of_very_different_sizes(shape, factor):
    linear = pytest.importorskip("sklearn.linear_model")
    random = np.random.default_rng(0)
    x = random.normal(size=shape)
    x[:, 0] *= factor
    y = x[:, 1:2] + x[:, :1] / factor + 0.1 * random.normal(size=(len(x), 3))
    padded = np.concatenate([x, np.full((len(x), 1), 0.1)], axis=1)
    expected = linear.Ridge(alpha=0.01, solver="svd").fit(x, y)
    found = fit_ridge(padded, y, alphas=[0.01])
    np.testing.assert_allclose(found.predict(padded), expected.predict(x), atol=1e-6)
    np.testing.assert_allclose(found.weights[:-1].T, expected.coef_, atol=1e-6)
    assert found.weights[-1].abs().max() < 1e-9


def test_leave_one_out_of_uneven_features_equals_refitting():
    x, y = (torch.as_tensor(a) for a in make_data(20, 4))
    x = x * torch.tensor([1e7, 1.0, 1.0, 1e-3], dtype=torch.float64)
    expected = []
    for i in range(20):
        rest = torch.arange(20) != i
        fit = fit_path(RidgePath(x[rest]), y[rest], torch.full((3,), 2.0, dtype=torch.float64))
        expected.append(y[i] - fit.predict(x[i : i + 1])[0])
    torch.testing.assert_close(
        RidgePath(x).leave_one_out(y, 2.0), torch.stack(expected), rtol=1e-6, atol=1e-6
    )


def test_ridge_of_constant_features_predicts_the_mean():
    assert RidgePath(np.full((101, 2), 0.1)).squares.numel() == 0
    _, y = make_data(30, 4)
    found = fit_ridge(np.full((30, 2), 0.1), y)
    np.testing.assert_allclose(found.predict(np.full((5, 2), 0.1)), np.tile(y.mean(0), (5, 1)), rtol=1e-12)
    np.testing.assert_allclose(found.predict(np.full((5, 2), 9.0)), np.tile(y.mean(0), (5, 1)), rtol=1e-12)


def test_ridge_does_not_change_with_a_large_mean():
    x, y = make_data()
    found, expected = fit_ridge(x + 1e6, y - 1e6, alphas=[2.0]), fit_ridge(x, y, alphas=[2.0])
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found.predict(x + 1e6), expected.predict(x) - 1e6, rtol=1e-12, atol=1e-6)


def test_ridge_takes_mixed_dtypes_a_vector_of_targets_and_default_penalties():
    x, y = make_data(40, 6)
    found = fit_ridge(torch.as_tensor(x).float(), np.round(y[:, 0]).astype(np.int32))
    expected = fit_ridge(x.astype(np.float32).astype(np.float64), np.round(y[:, :1]))
    torch.testing.assert_close(found.weights, expected.weights)
    assert (found.weights.shape, found.weights.dtype) == ((6, 1), torch.float64)
    assert found.errors is not None and len(found.errors) == 17


@pytest.mark.parametrize("shape", [(1, 3), (5, 0)])
def test_ridge_refuses_one_row_or_no_feature(shape):
    with pytest.raises(InterpError, match="expected at least 2 rows and 1 feature"):
        fit_ridge(np.zeros(shape), np.zeros(shape[0]))


def test_ridge_refuses_features_that_are_not_finite():
    x, y = make_data()
    with pytest.raises(InterpError, match="x holds 60 values"):
        fit_ridge(np.concatenate([x, np.full((60, 1), np.inf)], axis=1), y)
    with pytest.raises(InterpError, match="alphas are"):
        ridge_from_moments(Moments.of({"x": x, "y": y}), "x", "y", 0.0)
