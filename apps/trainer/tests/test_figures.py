"""Speed as figures: conventions, peaks that are known, devices that are not."""

from types import SimpleNamespace

import pytest
import torch
from forge_config import ConfigError
from forge_model import initialize
from forge_parallel import Env, Mesh, MeshConfig, build_mesh
from forge_parallel.activation_checkpointing import checkpoint_activations
from forge_parallel.testing import run_ranks
from forge_trainer.config.job import load_job
from forge_trainer.hooks.figures import PEAK_TFLOPS, Figures, frozen_parts, repeated_flops
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode


def figures(flags=(), device="cpu", ranks=2) -> Figures:
    job = load_job("configs/runs/debug.toml", flags).value
    mesh, env = SimpleNamespace(device=torch.device(device)), SimpleNamespace(world_size=ranks)
    return Figures(SimpleNamespace(job=job, mesh=mesh, env=env, parts=[]), frozen=())


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
    assert not any(name.startswith(("mfu", "hfu")) for name in figures().of(1.0))


@pytest.mark.parametrize("mode", ["none", "full", "every", "selective", "offload"])
def test_hfu_counts_what_torch_counts(mode):
    flags = [f"--activation_checkpointing.mode={mode}", "--track.peak_tflops=1"]
    job = load_job("configs/runs/debug.toml", flags).value
    model, length = job.model.build(), job.data.max_tokens
    initialize(model, 0)
    checkpoint_activations(model.layers.values(), job.activation_checkpointing)
    tokens = torch.zeros(1, length, dtype=torch.int64)
    # a product whose result nobody needs again is left out otherwise, here the last one of each block
    counter = FlopCounterMode(display=False)
    with set_checkpoint_early_stop(False), sdpa_kernel(SDPBackend.MATH), counter:
        model(tokens).logsumexp(-1).sum().backward()
    every = job.model.flops_per_token(length, causal=False) + repeated_flops(job, causal=False)
    assert counter.get_total_flops() / length == pytest.approx(every, rel=1e-6)
    found = figures(flags, ranks=1).of(1e3)
    needed = job.model.flops_per_token(length) + repeated_flops(job)
    assert found["hfu"] == pytest.approx(1e3 * needed / 1e12)
    assert (found["hfu"] > found["mfu"]) == (mode in ("full", "every"))


def test_hfu_of_every_second_block_is_that_of_the_uneven_ones():
    flags = ["--model.num_layers=5", "--activation_checkpointing.mode=every"]
    job = load_job("configs/runs/debug.toml", flags).value
    assert repeated_flops(job) == pytest.approx(3 * job.model.layer_flops(job.data.max_tokens)[0])


def test_hfu_is_not_guessed_where_the_compiler_chooses():
    flags = ["--activation_checkpointing.mode=budget", "--compile.enabled=true", "--track.peak_tflops=1"]
    found = figures(flags).of(1.0)
    assert "mfu" in found and "hfu" not in found


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


def test_parts_that_are_frozen_are_those_without_a_trained_parameter():
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2), "between": nn.ReLU(), "decoder": nn.Linear(2, 2)})
    alone = Mesh(torch.device("cpu"))
    assert frozen_parts([model], alone) == set()
    model["encoder"].requires_grad_(False)
    assert frozen_parts([model], alone) == {"encoder"}
    other = nn.ModuleDict({"encoder": nn.Linear(2, 2)})
    assert frozen_parts([model, other], alone) == set(), "another stage of this rank trains some of it"


def test_a_frozen_tower_counts_its_forward_pass_only():
    """As the FLOPs of the configuration tell, which benchmarks/vlm.py compares with those of torch."""
    job = load_job("configs/runs/vlm_debug_joint.toml").value
    mesh, env = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(world_size=1)
    run = SimpleNamespace(job=job, mesh=mesh, env=env, parts=[])
    shapes = [{"tokens": (2, 127), "patches": (32, 3 * 8 * 8)}]
    trained, frozen = (Figures(run, names).of(1.0, shapes)["model_tflops"] for names in ((), {"encoder"}))
    given = shapes[0]
    apart = job.model.step_flops(given, True, ()) - job.model.step_flops(given, True, {"encoder"})
    assert apart > 0 and (trained - frozen) * 1e12 == pytest.approx(apart / (2 * 127))


def _frozen_on_stages():
    mesh = build_mesh(MeshConfig(pp=2), Env.detect())
    part = nn.Linear(2, 2).requires_grad_(False)
    first = {"encoder": part, "decoder": part}
    model = nn.ModuleDict([first, {"decoder": nn.Linear(2, 2)}][mesh.pipeline.rank])
    return frozen_parts([model], mesh)


@pytest.mark.dist
def test_parts_that_are_frozen_are_so_on_all_stages_of_a_pipeline():
    assert run_ranks(_frozen_on_stages, 2) == [{"encoder"}] * 2
