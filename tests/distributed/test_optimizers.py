"""Every optimizer under every layout against one process in float64: weights after some steps."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from forge_data.loader import MicroBatch
from forge_model import DecoderConfig, LossConfig, initialize
from forge_model.attention_config import GroupedQueryConfig
from forge_parallel import Env, Mesh, MeshConfig, Plan, build_mesh, local_shard, materialize, parallelize
from forge_parallel.testing import run_ranks
from forge_trainer.optim import (
    AdamWConfig,
    GroupRule,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    ScheduleFreeAdamWConfig,
    exchange,
    trainable,
)
from forge_trainer.optim.groups import freeze
from forge_trainer.steps.text import TextStep
from forge_trainer.steps.update import Update

VOCAB, TOKENS, ROWS, STEPS = 36, 8, 8, 4
MODEL = DecoderConfig(
    vocab_size=VOCAB, dim=16, num_layers=2, max_tokens=TOKENS, attention=GroupedQueryConfig(num_heads=4)
)
LAYOUTS = {
    "fsdp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "hsdp2x2": (4, {"dp_replicate": 2}),
    "fsdp2-tp2": (4, {"tp": 2}),
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
    "schedule-free": ScheduleFreeAdamWConfig(lr=0.01),
}


QUICK = {*((name, "fsdp2") for name in OPTIMIZERS), ("muon", "tp2")}


def batch(index: int, mesh: Mesh) -> list[MicroBatch]:
    """This rank's part of a global batch."""
    rows = torch.randint(VOCAB, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(index))
    mine = rows.chunk(mesh.batch.size)[mesh.batch.rank]
    targets = torch.tensor(mine[:, 1:].numel())
    return [MicroBatch({"tokens": mine[:, :-1], "labels": mine[:, 1:].clone()}, {"targets": targets})]


def trained(sizes: dict, name: str) -> dict[str, torch.Tensor]:
    """Every weight after some steps, put together from what each rank holds."""
    env, config = Env.detect(), OPTIMIZERS[name]
    exchange.BUCKET_ELEMENTS = 300
    mesh = build_mesh(MeshConfig(**sizes), env) if env.world_size > 1 else Mesh(env.device)
    with torch.device("meta"):
        model = MODEL.build().to(torch.float64)
    freeze(model, config.groups)
    if env.world_size > 1:
        parallelize(model, mesh, Plan.of(model))
    materialize(model, mesh.device)
    initialize(model, 3, local_shard)
    update = Update([model], config.build(trainable([model]), mesh), lambda step: 1 - step / 10, 0.5, mesh)
    step = TextStep([model], LossConfig().build(), mesh, update=update)
    for index in range(STEPS):
        step.train(batch(index, mesh), index)
    return full(model)


def full(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter, put together from what each rank says it holds."""
    shards = {name: local_shard(parameter) for name, parameter in model.named_parameters()}
    boxes = {name: (shard.values.clone(), shard.offsets) for name, shard in shards.items()}
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, boxes)
    found = {name: torch.full(p.shape, torch.nan, dtype=p.dtype) for name, p in model.named_parameters()}
    for name, (values, offsets) in (item for boxes in everyone for item in boxes.items()):
        found[name][tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))] = values
    return found


@cache
def single(name: str) -> dict[str, torch.Tensor]:
    return run_ranks(trained, 1, {}, name)[0]


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
    one = single(name)
    for many in run_ranks(trained, world_size, sizes, name):
        for key, value in one.items():
            torch.testing.assert_close(many[key], value, rtol=1e-9, atol=1e-11, msg=key)
