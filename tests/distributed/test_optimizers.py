"""Every optimizer under every layout against one process in float64, with evaluations between the steps."""

from functools import cache

import pytest
import torch
from forge_model import DecoderConfig
from forge_model.attention_config import GroupedQueryConfig
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
from parity import TOKENS, VOCAB, batch, full, made, parameters

STEPS = 4
MODEL = DecoderConfig(
    vocab_size=VOCAB, dim=16, num_layers=2, max_tokens=TOKENS, attention=GroupedQueryConfig(num_heads=4)
)
LAYOUTS = {
    "fsdp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "cp2": (2, {"cp": 2}),
    "pp2": (2, {"pp": 2}),
    "hsdp2x2": (4, {"dp_replicate": 2}),
    "fsdp2-tp2": (4, {"tp": 2}),
    "pp2-fsdp2": (4, {"pp": 2}),
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


QUICK = {*((name, "fsdp2") for name in OPTIMIZERS), ("muon", "tp2"), ("schedule-free", "pp2")}


def trained(sizes: dict, name: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Every weight after some steps, put together from what each rank holds, and what was evaluated."""
    exchange.BUCKET_ELEMENTS = 300
    config, losses = OPTIMIZERS[name], []
    run = made(sizes, MODEL, "float64", optimizer=config)
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
    ],
)
def test_optimizer_equals_one_process(name, layout):
    world_size, sizes = LAYOUTS[layout]
    one, losses = single(name)
    for many, evaluated in run_ranks(trained, world_size, sizes, name):
        assert evaluated == pytest.approx(losses, rel=1e-9)
        for key, value in one.items():
            torch.testing.assert_close(many[key], value, rtol=1e-9, atol=1e-11, msg=key)
