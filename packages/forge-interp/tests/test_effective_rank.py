import pytest
import torch
from forge_interp.analysis.accumulate import Moments
from forge_interp.analysis.effective_rank import effective_rank
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
