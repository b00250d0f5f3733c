import math

import numpy as np
import pytest
import torch
from forge_interp.analysis.accumulate import Moments
from forge_interp.analysis.cka import MinibatchCKA, linear_cka
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


def test_minibatch_cka_of_one_batch_equals_debiased_cka():
    layers = make_layers()
    found = MinibatchCKA(layers)
    found.update(layers)
    np.testing.assert_allclose(found.result().values, linear_cka(Moments.of(layers)).values, atol=1e-10)


def test_minibatch_cka_equals_summed_gram_form_and_merges():
    layers = make_layers()
    batches = [{name: x[i : i + 16] for name, x in layers.items()} for i in range(0, 80, 16)]
    sums = np.zeros((3, 3))
    for batch in batches:
        grams = [(x - x.mean(0)) @ (x - x.mean(0)).T for x in batch.values()]
        sums += [[_gram_hsic_unbiased(k, m).item() for m in grams] for k in grams]
    first, second = MinibatchCKA(layers), MinibatchCKA(layers)
    for i, batch in enumerate(batches):
        (first if i % 2 else second).update(batch)
    own = np.sqrt(np.diag(sums))
    np.testing.assert_allclose(first.merge(second).result().values, sums / own / own[:, None], atol=1e-10)


def test_minibatch_cka_finds_the_truth_where_averaging_biased_ones_does_not():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(8000, 64, generator=random, dtype=torch.float64)
    layers = {"x": x, "y": 0.6 * x + 0.8 * torch.randn(8000, 64, generator=random, dtype=torch.float64)}
    truth = linear_cka(Moments.of(layers)).values[0, 1]
    found, biased = MinibatchCKA(["x"], ["y"]), []
    for i in range(0, 8000, 32):
        batch = {name: value[i : i + 32] for name, value in layers.items()}
        found.update(batch)
        biased.append(linear_cka(Moments.of(batch), debiased=False).values[0, 1])
    assert found.result().values.item() == pytest.approx(truth, abs=0.01)
    assert np.mean(biased) > truth + 0.2


def test_minibatch_cka_sums_over_ranks():
    layers = make_layers()
    found = MinibatchCKA(layers)
    found.update(layers)
    once = found.state()["hsic"].clone()
    found.all_reduce(lambda tensor: tensor.mul_(2))
    assert torch.equal(found.state()["hsic"], 2 * once)


def test_minibatch_cka_refuses_small_batches_and_missing_layers():
    found = MinibatchCKA(["x"], ["y"])
    with pytest.raises(InterpError, match="lacks \\['y'\\]"):
        found.update({"x": torch.randn(8, 2)})
    with pytest.raises(InterpError, match="at least 4"):
        found.update({"x": torch.randn(3, 2), "y": torch.randn(3, 2)})
