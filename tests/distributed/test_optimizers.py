"""Every optimizer under every layout against one process in float64, with evaluations between the steps."""

from functools import cache

import pytest
import torch
from forge_model import DecoderConfig
from forge_model.attention.config import GroupedQueryConfig
from forge_model.config import MoEConfig, SigmoidRouterConfig
from forge_parallel import Env, MeshConfig, build_mesh
from forge_parallel.testing import run_ranks
from forge_trainer.optim import (
    AdamWConfig,
    GroupRule,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    ScheduleFreeAdamWConfig,
    gather_matrices,
    local_parameters,
)
from forge_trainer.optim.averaged import evaluation_weights
from forge_trainer.optim.parameters import NamedParameter
from msgspec.structs import replace
from parity import TOKENS, VOCAB, batch, full, made, parameters
from torch.distributed.tensor import Shard, distribute_tensor

STEPS, EVALUATE_EVERY = 20, 7
MODEL = DecoderConfig(
    vocab_size=VOCAB, dim=16, num_layers=2, max_tokens=TOKENS, attention=GroupedQueryConfig(num_heads=4)
)
EXPERTS = replace(MODEL, ffn=MoEConfig(num_experts=4, dim=12, shared_experts=1, router=SigmoidRouterConfig()))
LAYOUTS = {
    "fsdp2": (2, {}),
    "hsdp2x2": (4, {"dp_replicate": 2}),
    "tp2": (2, {"tp": 2}),
    "cp2": (2, {"cp": 2}),
    "pp2": (2, {"pp": 2}),
    "fsdp2-tp2": (4, {"tp": 2}),
    "fsdp2-cp2": (4, {"cp": 2}),
    "tp2-cp2": (4, {"tp": 2, "cp": 2}),
    "pp2-fsdp2": (4, {"pp": 2}),
    "pp2-tp2": (4, {"pp": 2, "tp": 2}),
    "fsdp2-ep2": (4, {"ep": 2}),
    "hsdp2x2-ep2": (4, {"dp_replicate": 2, "ep": 2}),
    "ep2-tp2": (4, {"ep": 2, "tp": 2}),
    "pp2-ep2": (4, {"pp": 2, "ep": 2}),
}
RULES = (
    GroupRule(match=("embed",), freeze_from=0),
    GroupRule(match=("layers.0.attention",), freeze_until=5),
    GroupRule(match=("layers.1.ffn",), lr=0.5, decay=2.0),
    GroupRule(roles=("head",), decay=0.0),
)
OPTIMIZERS: dict[str, OptimizerConfig] = {
    "adamw": AdamWConfig(lr=0.01),
    "adamw-frozen": AdamWConfig(lr=0.01, groups=RULES),
    "adamw-ema": AdamWConfig(lr=0.01, ema_decay=0.5),
    "lion": LionConfig(lr=0.003),
    "lion-compiled": LionConfig(lr=0.003, compile=True),
    "muon": MuonConfig(lr=0.01, scale="original"),
    "muon-frozen": MuonConfig(lr=0.01, scale="spectral", groups=RULES),
    "muon-ema": MuonConfig(lr=0.01, scale="match-rms-adamw", ema_decay=0.5, nesterov=False),
    "schedule-free": ScheduleFreeAdamWConfig(lr=0.01),
    "schedule-free-frozen": ScheduleFreeAdamWConfig(lr=0.01, groups=RULES, weight_power=1.0),
}

QUICK = {
    *((name, "fsdp2") for name in ("adamw-frozen", "lion", "muon", "schedule-free")),
    ("muon", "tp2"),
    ("muon-frozen", "fsdp2-ep2"),
    ("schedule-free", "pp2"),
}


def trained(sizes: dict, name: str, experts: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Every weight after 20 steps, put together from what each rank holds, and what was evaluated."""
    gather_matrices.BUCKET_ELEMENTS = 300
    local_parameters.COMPILED_ELEMENTS = 100
    config, losses = OPTIMIZERS[name], []
    run = made(sizes, EXPERTS if experts else MODEL, "float64", optimizer=config)
    for index in range(STEPS):
        run.step.train(batch(index, run.mesh), index)
        if index % EVALUATE_EVERY == 0 or index == STEPS - 1:
            with evaluation_weights(config, run.optimizer):
                losses.append(run.step.evaluate([batch(STEPS, run.mesh)])["loss"])
    return full(parameters(run.parts)), losses


@cache
def single(name: str, experts: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    return run_ranks(trained, 1, {}, name, experts)[0]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if (name, layout) in QUICK else [pytest.mark.slow])
        for name in OPTIMIZERS
        for layout in LAYOUTS
    ],
)
def test_optimizer_equals_one_process(name, layout):
    world_size, sizes = LAYOUTS[layout]
    one, losses = single(name, "ep" in sizes)
    for many, evaluated in run_ranks(trained, world_size, sizes, name, "ep" in sizes, timeout_s=150):
        assert evaluated == pytest.approx(losses, rel=1e-9)
        for key, value in one.items():
            torch.testing.assert_close(many[key], value, rtol=1e-9, atol=1e-11, msg=key)


def stepped(sizes: dict) -> list[torch.Tensor]:
    """Matrices sharded over the ranks, of which only the first has gradients; after a step."""
    mesh = build_mesh(MeshConfig(**sizes), Env.detect())
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(2):
        value, gradient = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
        gradient[2:] = 0  # of the rank that has none
        parameter = torch.nn.Parameter(distribute_tensor(value, mesh.fsdp, [Shard(0)]))
        if mesh.fsdp.get_local_rank() == 0:
            parameter.grad = distribute_tensor(gradient, mesh.fsdp, [Shard(0)], src_data_rank=None)
        found.append(NamedParameter(str(index), parameter, "matrix"))
    MuonConfig(lr=0.01, scale="original").build(found, mesh).step()
    return [one.parameter.full_tensor().detach() for one in found]


@pytest.mark.dist
def test_muon_takes_a_step_where_one_rank_has_no_gradient_at_all():
    one = run_ranks(stepped, 1, {"dp_shard": 1})[0]
    for many in run_ranks(stepped, 2, {}, timeout_s=30):
        for matrix, reference in zip(many, one, strict=True):
            torch.testing.assert_close(matrix, reference, rtol=1e-10, atol=1e-12)
