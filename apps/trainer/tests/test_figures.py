"""Speed as figures: conventions, peaks that are known, devices that are not."""

from types import SimpleNamespace

import pytest
import torch
from forge_config import ConfigError
from forge_trainer.hooks.figures import PEAK_TFLOPS, Figures
from forge_trainer.job import load_job


def figures(flags=(), device="cpu", ranks=2) -> Figures:
    job = load_job("configs/runs/debug.toml", flags).value
    mesh, env = SimpleNamespace(device=torch.device(device)), SimpleNamespace(world_size=ranks)
    return Figures(SimpleNamespace(job=job, mesh=mesh, env=env))


def test_mfu_is_model_flops_of_a_device_over_its_peak():
    job = load_job("configs/runs/debug.toml").value
    found = figures(["--track.peak_tflops=0.5"]).of(1000.0)
    tokens = job.data.max_tokens
    assert found["tokens_per_s_per_device"] == 500.0
    assert found["model_tflops"] == pytest.approx(1000 * job.model.flops_per_token(tokens) / 1e12)
    assert found["mfu"] == pytest.approx(500 * job.model.flops_per_token(tokens) / 0.5e12)
    full = job.model.flops_per_token(tokens, causal=False)
    assert found["mfu_full_attention"] == pytest.approx(500 * full / 0.5e12)
    assert found["mfu_full_attention"] > found["mfu"]
    assert 0.01 < found["memory_gib"] < 100


def test_cpu_has_no_mfu():
    assert not any("mfu" in name for name in figures().of(1.0))


@pytest.mark.parametrize(
    ("name", "flags", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", ["--precision.compute=bfloat16"], 989.0),
        ("NVIDIA H100 PCIe", ["--precision.compute=bfloat16"], 756.0),
        ("NVIDIA H100 PCIe", ["--precision.compute=float32"], None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", ["--precision.compute=bfloat16"], None),
        ("A device of the future", ["--track.peak_tflops=7"], 7.0),
    ],
)
def test_peak_is_known_or_not_but_never_guessed(name, flags, peak, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 << 30)
    found = figures(flags, "cuda:0", ranks=1).of(1e6)
    assert found["memory_gib"] == 3.0
    if peak is None:
        assert "mfu" not in found and "track.peak_tflops" in capsys.readouterr().err
    else:
        assert found["mfu"] == pytest.approx(found["model_tflops"] / peak)
        assert capsys.readouterr().err == ""
    assert set(PEAK_TFLOPS.values()) <= {312.0, 756.0, 835.0, 989.0}


def test_peak_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="peak_tflops"):
        load_job("configs/runs/debug.toml", ["--track.peak_tflops=0"])
