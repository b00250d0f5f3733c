import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

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
    shares = s.square().cumsum(0) / s.square().sum()
    assert shares[found.components_99 - 1] >= 0.99 > shares[found.components_99 - 2]
    for constant in (1.0, 0.1, 1e6 + 0.1):
        with pytest.raises(InterpError, match="never varies"):
            effective_rank(Moments.of({"x": torch.full((9, 2), constant, dtype=torch.float64)}), "x")


def test_effective_rank_counts_no_rounding_where_features_outnumber_samples():
    x = torch.randn(20, 300, dtype=torch.float64)
    s = torch.linalg.svdvals(x - x.mean(0))[:19]
    p = s / s.sum()
    found = effective_rank(Moments.of({"x": x}), "x")
    assert found.entropy == pytest.approx((-(p * p.log()).sum()).exp().item(), rel=1e-9)
    assert found.components_99 <= 19


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


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_profile_all_reduce_adds_sums_and_takes_maxima(offset):
    x = make_activations() + offset
    ranks = [Profile({"x": 16}) for _ in range(2)]
    offers: dict[int, torch.Tensor] = {}
    all_here = threading.Barrier(2)

    def together(rank: int, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
        def replace(tensor: torch.Tensor) -> None:
            offers[rank] = tensor.clone()
            all_here.wait(timeout=60)
            tensor.copy_(combine(offers[0], offers[1]))
            all_here.wait(timeout=60)

        return replace

    def run(rank: int) -> Profile:
        ranks[rank].update({"x": x[:100] if rank == 0 else x[100:]})
        return ranks[rank].all_reduce(together(rank, torch.add), together(rank, torch.maximum))

    with ThreadPoolExecutor(2) as pool:
        for profile in pool.map(run, range(2)):
            assert_profile(profile, x)


def test_profile_keeps_the_spread_of_norms_far_from_zero():
    x = 1e6 + make_activations()
    first, second = Profile({"x": 16}), Profile({"x": 16})
    first.update({"x": x[:7]})
    for part in x[7:].split(50):
        second.update({"x": part})
    norms = np.linalg.norm(x.numpy().astype(np.longdouble), axis=1)
    found = Profile({"x": 16}).merge(first).merge(second).result("x")
    assert found.std_norm == pytest.approx(float(norms.std()), rel=1e-7)
    assert found.mean_norm == pytest.approx(float(norms.mean()), rel=1e-14)


def test_profile_merges_into_an_empty_one_and_leaves_the_other_as_it_was():
    x = make_activations()
    empty, full = Profile({"x": 16}), Profile({"x": 16})
    full.update({"x": x[:120]})
    before = {name: tensor.clone() for name, tensor in full.state().items()}
    empty.merge(full).update({"x": x[120:]})
    assert_profile(empty, x)
    assert_profile(empty.merge(Profile({"x": 16})), x)
    larger = Profile({"x": 16})
    larger.update({"x": 9 * x})
    larger.merge(full)
    assert all(torch.equal(before[name], tensor) for name, tensor in full.state().items())


def test_profile_state_round_trips_and_refuses_another_shape():
    x = make_activations()
    profile = Profile({"x": 16})
    profile.update({"x": x})
    saved = {name: tensor.clone() for name, tensor in profile.state().items()}
    assert_profile(Profile({"x": 16}).load_state(saved), x)
    with pytest.raises(InterpError, match=r"'x/sums' has \(51,\); expected shape \(54,\)"):
        Profile({"x": 17}).load_state(saved)
    with pytest.raises(InterpError, match="cannot merge"):
        Profile({"x": 16}, threshold=5.0).merge(profile)


def test_profile_adds_nothing_of_a_batch_that_it_refuses():
    profile = Profile({"x": 3, "y": 2})
    with pytest.raises(InterpError, match="y holds 1 values"):
        profile.update({"x": np.ones((4, 3)), "y": np.where(np.arange(8).reshape(4, 2) == 5, np.nan, 1.0)})
    assert not any(tensor.any() for tensor in profile.state().values())
    profile.update({"x": np.zeros((0, 3)), "y": np.ones((1, 2))})
    assert profile.result("y").mean_norm == pytest.approx(2**0.5)
    with pytest.raises(InterpError, match="'x' has no samples"):
        profile.result("x")


def test_result_does_not_change_with_a_later_update():
    profile = Profile({"x": 16})
    profile.update({"x": make_activations()})
    found = profile.result("x")
    before = found.max_abs.copy()
    profile.update({"x": 100 * make_activations()})
    np.testing.assert_array_equal(found.max_abs, before)


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
