import numpy as np
import pytest
import torch
from forge_interp.analysis.accumulate import Moments
from forge_interp.analysis.profile import Profile, effective_rank
from forge_interp.errors import InterpError


def test_effective_rank_of_equal_directions_is_their_number():
    basis = torch.linalg.qr(torch.randn(50, 6, dtype=torch.float64)).Q
    centred = torch.linalg.qr(basis - basis.mean(0)).Q @ torch.randn(6, 20, dtype=torch.float64).svd().V.T[:6]
    found = effective_rank(Moments.of({"x": centred + 3}), "x")
    assert found.entropy == pytest.approx(6, abs=1e-4)
    assert found.participation == pytest.approx(6, abs=1e-6)
    assert found.components_99 == 6


def test_effective_rank_equals_the_definition():
    x = torch.randn(40, 10, dtype=torch.float64) * torch.logspace(0, -2, 10)
    s = torch.linalg.svdvals(x - x.mean(0))
    p = s / s.sum()
    found = effective_rank(Moments.of({"x": x}), "x")
    assert found.entropy == pytest.approx((-(p * p.log()).sum()).exp().item(), rel=1e-9)
    assert found.participation == pytest.approx((s.square().sum() ** 2 / s.pow(4).sum()).item(), rel=1e-9)
    with pytest.raises(InterpError, match="never varies"):
        effective_rank(Moments.of({"x": torch.ones(9, 2)}), "x")


def make_activations() -> torch.Tensor:
    x = torch.randn(300, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:, 3] *= 20
    return x


def assert_profile(profile: Profile, x: torch.Tensor) -> None:
    found, norms = profile.result("x"), x.norm(dim=1)
    assert found.mean_norm == pytest.approx(norms.mean().item())
    assert found.std_norm == pytest.approx(norms.std(correction=0).item())
    assert found.max_norm == pytest.approx(norms.max().item())
    np.testing.assert_allclose(found.rms, x.square().mean(0).sqrt())
    np.testing.assert_allclose(found.max_abs, x.abs().amax(0))
    np.testing.assert_allclose(found.kurtosis, x.pow(4).mean(0) / x.square().mean(0) ** 2)
    np.testing.assert_allclose(found.outlier_share, (x.abs() >= 6).double().mean(0))


def test_profile_equals_the_definition_in_batches_and_merged():
    x = make_activations()
    first, second = Profile({"x": 16}), Profile({"x": 16})
    for i, part in enumerate(x.split(70)):
        (first if i % 2 else second).update({"x": part})
    assert_profile(first.merge(second), x)


def test_profile_all_reduce_adds_sums_and_takes_maxima():
    x = make_activations()
    here, there = Profile({"x": 16}), Profile({"x": 16})
    here.update({"x": x[:100]})
    there.update({"x": x[100:]})
    sums, tops = there.state()["x/sums"], there.state()["x/tops"]
    here.all_reduce(
        lambda tensor: tensor.add_(sums), lambda tensor: tensor.copy_(torch.maximum(tensor, tops))
    )
    assert_profile(here, x)


def test_profile_names_the_outlier_feature():
    profile = Profile({"x": 16})
    profile.update({"x": make_activations()})
    np.testing.assert_array_equal(profile.result("x").outliers(), [3])


def test_profile_refuses_bad_batches_and_an_empty_result():
    profile = Profile({"x": 3})
    with pytest.raises(InterpError, match="no samples"):
        profile.result("x")
    with pytest.raises(InterpError, match="x has 2 features"):
        profile.update({"x": np.zeros((4, 2))})
    with pytest.raises(InterpError, match="expected \\['x'\\]"):
        profile.update({"y": np.zeros((4, 3))})
    with pytest.raises(InterpError, match="NaN"):
        profile.update({"x": np.full((4, 3), np.inf)})
