"""Every optimizer under every layout against one process in float64, with evaluations between the steps."""

from functools import cache

import pytest
import torch
from forge_model import DecoderConfig
from forge_model.attention_config import GroupedQueryConfig
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
    exchange,
)
from forge_trainer.optim.averaged import evaluation_weights
from forge_trainer.optim.parameters import NamedParameter
from msgspec.structs import replace
from parity import TOKENS, VOCAB, batch, full, made, parameters
from torch.distributed.tensor import Shard, distribute_tensor

STEPS = 4
MODEL = DecoderConfig(
    vocab_size=VOCAB, dim=16, num_layers=2, max_tokens=TOKENS, attention=GroupedQueryConfig(num_heads=4)
)
EXPERTS = replace(MODEL, ffn=MoEConfig(num_experts=4, dim=12, shared_experts=1, router=SigmoidRouterConfig()))
LAYOUTS = {
    "fsdp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "cp2": (2, {"cp": 2}),
    "pp2": (2, {"pp": 2}),
    "hsdp2x2": (4, {"dp_replicate": 2}),
    "fsdp2-tp2": (4, {"tp": 2}),
    "pp2-fsdp2": (4, {"pp": 2}),
    "fsdp2-ep2": (4, {"ep": 2}),
    "ep2-tp2": (4, {"ep": 2, "tp": 2}),
}
RULES = (
    GroupRule(match=("embed",), freeze_from=0),
    GroupRule(match=("layers.0.attention",), freeze_until=2),
    GroupRule(match=("layers.1.ffn",), lr=0.5, decay=2.0),
)
OPTIMIZERS: dict[str, OptimizerConfig] = {
    "adamw-frozen": AdamWConfig(lr=0.01, groups=RULES),
    "lion": LionConfig(lr=0.01),
    "muon": MuonConfig(lr=0.01, scale="original"),
    "muon-experts": MuonConfig(lr=0.01, scale="original"),
    "schedule-free": ScheduleFreeAdamWConfig(lr=0.01),
    "adamw-ema": AdamWConfig(lr=0.01, ema_decay=0.5),
}


QUICK = {
    *((name, "fsdp2") for name in OPTIMIZERS if name != "muon-experts"),
    ("muon", "tp2"),
    ("muon-experts", "fsdp2-ep2"),
    ("schedule-free", "pp2"),
}


def trained(sizes: dict, name: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Every weight after some steps, put together from what each rank holds, and what was evaluated."""
    exchange.BUCKET_ELEMENTS = 300
    config, losses = OPTIMIZERS[name], []
    run = made(sizes, EXPERTS if name == "muon-experts" else MODEL, "float64", optimizer=config)
    for index in range(STEPS):
        run.step.train(batch(index, run.mesh), index)
        with evaluation_weights(config, run.optimizer):
            losses.append(run.step.evaluate([batch(STEPS, run.mesh)])["loss"])
    return full(parameters(run.parts)), losses


@cache
def single(name: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    return run_ranks(trained, 1, {}, name)[0]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if (name, layout) in QUICK else [pytest.mark.slow])
        for name in OPTIMIZERS
        for layout in LAYOUTS
        if "ep" not in LAYOUTS[layout][1] or name == "muon-experts"
    ],
)
def test_optimizer_equals_one_process(name, layout):
    world_size, sizes = LAYOUTS[layout]
    one, losses = single(name)
    for many, evaluated in run_ranks(trained, world_size, sizes, name):
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
