import numpy as np
import pytest
import torch
from forge_interp.analysis.accumulate import Moments
from forge_interp.analysis.similarity import canonical_correlations, mean_cca, procrustes, svcca
from forge_interp.errors import InterpError


def make_layers(n: int = 120, seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=random, dtype=torch.float64) * torch.logspace(0.5, -0.5, 8)
    y = x[:, :5] @ torch.randn(5, 6, generator=random, dtype=torch.float64)
    return {"x": x + 2, "y": y + torch.randn(n, 6, generator=random, dtype=torch.float64)}


def orthogonal(width: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(width, width, dtype=torch.float64)).Q


def affine(x: torch.Tensor) -> torch.Tensor:
    width = x.shape[1]
    return x @ (torch.randn(width, width, dtype=torch.float64) + 3 * torch.eye(width)) + 5


def qr_correlations(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The textbook way: singular values of Qx^T Qy."""
    qx, qy = (torch.linalg.qr(a - a.mean(0)).Q for a in (x, y))
    return torch.linalg.svdvals(qx.T @ qy)


def test_canonical_correlations_equal_those_by_qr():
    layers = make_layers()
    found = canonical_correlations(Moments.of(layers), "x", "y")
    np.testing.assert_allclose(found, qr_correlations(**layers), atol=1e-10)


def test_canonical_correlations_equal_scikit_learn():
    cross = pytest.importorskip("sklearn.cross_decomposition")
    layers = make_layers()
    model = cross.CCA(n_components=2, max_iter=5000, tol=1e-12)
    u, v = model.fit_transform(layers["x"].numpy(), layers["y"].numpy())
    expected = [np.corrcoef(u[:, i], v[:, i])[0, 1] for i in range(2)]
    found = canonical_correlations(Moments.of(layers), "x", "y")[:2]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_mean_cca_does_not_change_under_affine_maps():
    layers = make_layers()
    moved = {name: affine(x) for name, x in layers.items()}
    before, after = (mean_cca(Moments.of(each)).values for each in (layers, moved))
    np.testing.assert_allclose(after, before, atol=1e-8)
    assert 0.2 < before[0, 1] < 0.95


def test_svcca_reduces_by_svd_first():
    layers = make_layers()
    reduced = []
    for x in layers.values():
        u, s, _ = torch.linalg.svd(x - x.mean(0), full_matrices=False)
        share = s.square().cumsum(0) / s.square().sum()
        count = int((share < 0.9).sum()) + 1
        reduced.append(u[:, :count] * s[:count])
    expected = qr_correlations(*reduced).mean()
    found = svcca(Moments.of(layers), keep=0.9).values[0, 1]
    assert found == pytest.approx(expected.item(), abs=1e-10)
    assert abs(found - mean_cca(Moments.of(layers)).values[0, 1]) > 1e-3


def test_svcca_and_procrustes_do_not_change_under_rotation_and_scale():
    layers = make_layers()
    moved = {name: 0.3 * x @ orthogonal(x.shape[1]) - 4 for name, x in layers.items()}
    for measure in (svcca, procrustes):
        before, after = (measure(Moments.of(each)).values for each in (layers, moved))
        np.testing.assert_allclose(after, before, atol=1e-8)


def test_procrustes_equals_the_best_rotation():
    scipy_linalg = pytest.importorskip("scipy.linalg")
    layers = make_layers()
    x, y = (a - a.mean(0) for a in layers.values())
    x, y = x / x.norm(), torch.nn.functional.pad(y / y.norm(), (0, 2))
    rotation, _ = scipy_linalg.orthogonal_procrustes(y.numpy(), x.numpy())
    distance = np.square(x.numpy() - y.numpy() @ rotation).sum()
    assert 2 - 2 * procrustes(Moments.of(layers)).values[0, 1] == pytest.approx(distance, abs=1e-10)


def test_measures_are_one_for_a_layer_and_its_image():
    layers = make_layers()
    moments = Moments.of({"x": layers["x"], "rotated": layers["x"] @ orthogonal(8)})
    for measure in (mean_cca, svcca, procrustes):
        np.testing.assert_allclose(measure(moments).values, 1, atol=1e-8)


def test_whitening_leaves_out_directions_without_variance():
    layers = make_layers()
    doubled = {"x": torch.cat([layers["x"], layers["x"]], dim=1), "y": layers["y"]}
    found, expected = (mean_cca(Moments.of(each)).values[0, 1] for each in (doubled, layers))
    assert found == pytest.approx(expected, abs=1e-8)


def test_measures_refuse_bad_options_and_constant_layers():
    moments = Moments.of({"x": torch.randn(9, 3), "c": torch.ones(9, 2)})
    with pytest.raises(InterpError, match="keep is 0"):
        svcca(moments, keep=0)
    with pytest.raises(InterpError, match="never varies"):
        mean_cca(moments)
    with pytest.raises(InterpError, match="never varies"):
        procrustes(moments)


@pytest.mark.parametrize("constant", [1.0, 0.1, 1e6 + 0.1])
def test_measures_refuse_a_layer_that_is_constant_up_to_rounding(constant):
    layers = {"x": torch.randn(101, 3), "c": torch.full((101, 2), constant, dtype=torch.float64)}
    for measure in (mean_cca, svcca, procrustes):
        with pytest.raises(InterpError, match="never varies"):
            measure(Moments.of(layers))


def test_procrustes_of_a_layer_with_itself_leaves_no_range_by_rounding():
    for seed in range(20):
        moments = Moments.of(make_layers(30 + seed, seed))
        assert procrustes(moments).values.max() <= 1
        assert np.arccos(procrustes(moments).values.diagonal()).max() < 1e-6


def test_mean_cca_is_one_by_construction_when_features_are_as_many_as_samples_less_one():
    layers = make_layers(7)
    assert mean_cca(Moments.of(layers)).values[0, 1] == pytest.approx(1, abs=1e-8)
    assert mean_cca(Moments.of(layers), ridge=0.1).values[0, 1] < 0.95


def test_canonical_correlations_with_a_ridge_equal_the_penalized_form():
    layers, ridge = make_layers(), 0.03
    x, y = (a - a.mean(0) for a in layers.values())

    def root(a: torch.Tensor) -> torch.Tensor:
        gram = a.T @ a
        penalty = ridge * torch.linalg.eigvalsh(gram)[-1]
        return torch.linalg.cholesky(torch.linalg.inv(gram + penalty * torch.eye(len(gram))))

    expected = torch.linalg.svdvals(root(x).T @ x.T @ y @ root(y))
    found = canonical_correlations(Moments.of(layers), "x", "y", ridge=ridge)
    np.testing.assert_allclose(found, expected, atol=1e-10)


def test_measures_do_not_change_with_a_large_mean():
    layers = make_layers()
    moved = {name: x + 1e5 for name, x in layers.items()}
    for measure in (mean_cca, svcca, procrustes):
        before, after = (measure(Moments.of(each)).values for each in (layers, moved))
        np.testing.assert_allclose(after, before, atol=1e-7)


@pytest.mark.parametrize(("variance", "expected"), [(1e-9, [1, 0]), (2e-11, [0])])
def test_whitening_leaves_out_components_with_less_than_1e_10_of_the_variance_of_the_first(
    variance, expected
):
    basis = torch.linalg.qr(make_layers()["x"] - make_layers()["x"].mean(0)).Q
    layers = {"x": basis[:, :2] * torch.tensor([1.0, variance**0.5], dtype=torch.float64), "y": basis[:, 1:3]}
    found = canonical_correlations(Moments.of(layers), "x", "y")
    np.testing.assert_allclose(found, expected, atol=1e-5)
