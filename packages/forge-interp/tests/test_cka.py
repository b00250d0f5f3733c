import math

import numpy as np
import pytest
import torch
from forge_interp.analysis.accumulate import Moments
from forge_interp.analysis.similarity import linear_cka
from forge_interp.errors import InterpError


def make_layers(n: int = 80, seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=random, dtype=torch.float64) + 3.0
    y = x @ torch.randn(12, 7, generator=random, dtype=torch.float64)
    noise = torch.randn(n, 7, generator=random, dtype=torch.float64)
    return {"x": x, "y": y + 4 * noise, "z": 2 * noise - 1}


def gram_cka(x: torch.Tensor, y: torch.Tensor, debiased: bool) -> float:
    """By the definition, from [n, n] Gram matrices."""
    k, m = (a @ a.T for a in (x - x.mean(0), y - y.mean(0)))
    hsic = _gram_hsic_unbiased if debiased else lambda a, b: (a * b).sum()
    return float(hsic(k, m) / (hsic(k, k) * hsic(m, m)) ** 0.5)


def _gram_hsic_unbiased(k: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    n, one = len(k), torch.ones(len(k), dtype=k.dtype)
    k, m = k - torch.diag(k.diagonal()), m - torch.diag(m.diagonal())
    middle = (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
    return (torch.trace(k @ m) + middle - 2 / (n - 2) * (one @ k @ m @ one)) / (n * (n - 3))


@pytest.mark.parametrize("debiased", [False, True])
def test_cka_equals_gram_form(debiased):
    layers = make_layers()
    found = linear_cka(Moments.of(layers), debiased=debiased)
    expected = [[gram_cka(x, y, debiased) for y in layers.values()] for x in layers.values()]
    np.testing.assert_allclose(found.values, expected, rtol=0, atol=1e-10)


def test_cka_debiased_is_near_zero_for_independent_data_where_biased_is_near_one():
    random = torch.Generator().manual_seed(0)
    layers = {name: torch.randn(200, 2000, generator=random, dtype=torch.float64) for name in "xy"}
    moments = Moments.of(layers, between=(["x"], ["y"]))
    assert linear_cka(moments, debiased=False).values.item() > 0.9
    assert abs(linear_cka(moments).values.item()) < 0.05


@pytest.mark.parametrize("debiased", [False, True])
def test_cka_does_not_change_under_rotation_shift_and_scale(debiased):
    layers = make_layers()
    rotation = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64)).Q
    moved = {**layers, "x": -3.7 * layers["x"] @ rotation + 11}
    before, after = (linear_cka(Moments.of(each), debiased=debiased).values for each in (layers, moved))
    np.testing.assert_allclose(after, before, atol=1e-10)


def test_cka_changes_under_an_affine_map():
    layers = make_layers()
    stretched = {**layers, "x": layers["x"] * torch.logspace(0, 1, 12, dtype=torch.float64)}
    change = linear_cka(Moments.of(stretched)).values - linear_cka(Moments.of(layers)).values
    assert abs(change[0, 1]) > 0.01


def test_cka_is_nan_for_a_constant_layer_and_refuses_three_samples():
    constant = {"x": torch.randn(9, 3), "y": torch.ones(9, 2)}
    assert math.isnan(linear_cka(Moments.of(constant)).values[0, 1])
    with pytest.raises(InterpError, match="at least 4"):
        linear_cka(Moments.of({"x": torch.randn(3, 2)}))


@pytest.mark.parametrize("constant", [0.1, 1e6 + 0.1])
def test_cka_is_nan_for_a_layer_that_is_constant_up_to_rounding(constant):
    jitter = 1e-15 * torch.randn(101, 2, dtype=torch.float64)
    layers = {"x": torch.randn(101, 3, dtype=torch.float64), "c": constant * (1 + jitter)}
    moments = Moments.of(layers)
    for values in (linear_cka(moments).values, linear_cka(moments, debiased=False).values):
        assert values[0, 0] == pytest.approx(1, abs=1e-12)
        assert np.isnan(values[1]).all() and np.isnan(values[:, 1]).all()


@pytest.mark.parametrize("n", [5, 33])
def test_debiased_cka_is_nan_where_all_samples_are_equally_far_apart(n):
    layers = {"x": 1.7 * torch.eye(n, dtype=torch.float64), "y": torch.randn(n, 3, dtype=torch.float64)}
    values = linear_cka(Moments.of(layers)).values
    assert np.isnan(values[0]).all() and values[1, 1] == pytest.approx(1, abs=1e-12)


def test_cka_equals_gram_form_at_four_samples_and_with_more_features_than_samples():
    for n, debiased in ((4, True), (2, False), (9, True)):
        layers = make_layers(n)
        found = linear_cka(Moments.of(layers), debiased=debiased).values
        expected = [[gram_cka(x, y, debiased) for y in layers.values()] for x in layers.values()]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


def test_cka_equals_gram_form_for_activations_with_huge_means_and_one_outlier_feature():
    layers = make_layers(200)
    layers["x"][:, 2] *= 300
    moved = {name: x + 1e4 for name, x in layers.items()}
    for debiased in (False, True):
        found = linear_cka(Moments.of(moved), debiased=debiased).values
        expected = [[gram_cka(x, y, debiased) for y in layers.values()] for x in layers.values()]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-8)
