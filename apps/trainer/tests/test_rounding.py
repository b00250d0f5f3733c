"""Number formats that lose little: stochastic rounding, and what is refused."""

import pytest
import torch
from forge_config import ConfigError
from forge_parallel.capabilities import without_dynamo
from forge_trainer.config.job import load_job
from forge_trainer.optim import AdamWConfig, NamedParameter, rounding
from forge_trainer.optim.rounding import Place, stochastic_bfloat16


def test_stochastic_rounding_is_right_on_average_and_the_same_for_every_layout():
    value = torch.linspace(-3, 3, 64 * 32).view(64, 32)
    sum_ = torch.zeros_like(value)
    low, high = torch.full_like(value, torch.inf), torch.full_like(value, -torch.inf)
    for key in range(2000):
        made = stochastic_bfloat16(value, key * 7919, Place((0, 0), (64, 32), (64, 32))).float()
        sum_, low, high = sum_ + made, low.minimum(made), high.maximum(made)
    assert ((low <= value) & (value <= high)).all(), "the two neighbours, and never further"
    gap = (high - low).clamp(min=1e-9)
    assert ((sum_ / 2000 - value) / gap).abs().max() < 5 * 0.5 / 2000**0.5
    whole = stochastic_bfloat16(value, 5, Place((0, 0), (64, 32), (64, 32)))
    part = stochastic_bfloat16(value[10:20, 8:16], 5, Place((10, 8), (10, 8), (64, 32)))
    assert torch.equal(part, whole[10:20, 8:16])
    window = value[10:20, 8:16].flatten()[7:60]
    part = stochastic_bfloat16(window, 5, Place((10, 8), (10, 8), (64, 32), 7))
    assert torch.equal(part, whole[10:20, 8:16].flatten()[7:60])


def test_stochastic_rounding_goes_on_across_blocks(monkeypatch):
    value = torch.randn(64, 32)
    whole = stochastic_bfloat16(value, 5, Place((3, 0), (64, 32), (70, 32)))
    monkeypatch.setattr(rounding, "BLOCK_ELEMENTS", 100)
    assert torch.equal(stochastic_bfloat16(value, 5, Place((3, 0), (64, 32), (70, 32))), whole)


def test_stochastic_rounding_keeps_updates_that_bfloat16_would_lose():
    ends = {}
    for name in ("nearest", "stochastic", "exact"):
        dtype = torch.float32 if name == "exact" else torch.bfloat16
        gain = torch.nn.Parameter(torch.ones(64, dtype=dtype))
        config = AdamWConfig(lr=1e-4, rounding="nearest" if name == "exact" else name)
        with without_dynamo():
            optimizer = config.build([NamedParameter("gain", gain, "norm")])
        for _ in range(200):
            gain.grad = torch.ones_like(gain)
            with without_dynamo():
                optimizer.step()
        ends[name] = gain.detach().float().mean().item()
    assert ends["nearest"] == 1.0 and ends["exact"] == pytest.approx(0.98, abs=1e-3)
    assert ends["stochastic"] == pytest.approx(0.98, abs=8e-3)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--optimizer.moments=bfloat16", "--optimizer.betas=[0.9, 0.999]"], "would round changes away"),
        (["--optimizer.moments=int8"], "expected one of|float32"),
        (["--optimizer.rounding=stochastic"], "without precision.pure_bf16"),
    ],
)
def test_number_formats_that_lose_are_refused(flags, error):
    with pytest.raises(ConfigError, match=error):
        load_job("configs/runs/debug.toml", flags)
