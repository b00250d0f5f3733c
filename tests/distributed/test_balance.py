"""Loads of experts on skewed data: even with a bias that follows them, under every layout, not without."""

import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from forge_data.loading.loader import MicroBatch
from forge_model import DecoderConfig
from forge_model.config import (
    GroupedQueryConfig,
    LayerOverride,
    MoEConfig,
    SigmoidRouterConfig,
    SwiGLUConfig,
)
from forge_model.moe.balance import Load
from forge_model.moe.layer import expert_layers
from forge_parallel import Mesh, ParallelConfig
from forge_parallel.testing import run_ranks
from parity import made
from torch import Tensor

STEPS, WINDOW = 200, 20
VOCAB, TOKENS, ROWS = 512, 64, 32
LAYOUTS = {"one": (1, {}), "fsdp2": (2, {}), "ep2": (2, {"ep": 2}), "pp2": (2, {"pp": 2})}
BALANCED, UNBALANCED = 1.3, 2.0


def model(bias_rate: float) -> DecoderConfig:
    router = SigmoidRouterConfig(bias_rate=bias_rate)
    return DecoderConfig(
        vocab_size=VOCAB,
        dim=32,
        num_layers=2,
        max_tokens=TOKENS,
        init_std=0.1,
        attention=GroupedQueryConfig(num_heads=2),
        ffn=MoEConfig(num_experts=64, top_k=6, dim=8, router=router),
        overrides=[LayerOverride(layers="0", ffn=SwiGLUConfig(dim=32))],
    )


def skewed(index: int, mesh: Mesh) -> list[MicroBatch]:
    """This rank's rows of tokens whose frequency falls with their number, as that of words does."""
    generator = torch.Generator().manual_seed(index)
    frequency = 1 / (torch.arange(VOCAB) + 10.0)
    rows = torch.multinomial(frequency, ROWS * (TOKENS + 1), True, generator=generator).view(ROWS, -1)
    # half of the tokens repeat the one before with a shift, so that there is something to learn
    follows = torch.rand(ROWS, TOKENS, generator=generator) < 0.5
    rows[:, 1:] = torch.where(follows, (rows[:, :-1] * 3 + 1) % VOCAB, rows[:, 1:])
    mine = rows.chunk(mesh.batch.size)[mesh.batch.rank]
    return [
        MicroBatch(
            {"tokens": part[:, :-1], "labels": part[:, 1:]}, {"targets": torch.tensor(part[:, 1:].numel())}
        )
        for part in mine.chunk(mesh.pipeline.size)
    ]


def load(sizes: dict, bias_rate: float, steps: int) -> float:
    """The load of the busiest expert over the mean, in the last steps; 0 on ranks without experts."""
    parts, _, step, mesh = made(sizes, model(bias_rate), "float32", ParallelConfig())
    counts: list[Tensor] = []
    for router in (layer.router for part in parts for layer in expert_layers(part).values()):
        router.learn = partial(noted, counts, router.learn)
    for index in range(steps):
        step.train(skewed(index, mesh), index)
    total = sum(counts[-WINDOW:], torch.zeros(1))
    return (total.max() / total.mean()).nan_to_num().item()


def noted(counts: list[Tensor], learn: Callable[[Load], None], load: Load) -> None:
    counts.append(load.counts)
    learn(load)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bias_evens_the_load_of_64_experts(layout):
    ranks, sizes = LAYOUTS[layout]
    even = max(run_ranks(load, ranks, sizes, 0.004, STEPS, timeout_s=400))
    uneven = max(run_ranks(load, ranks, sizes, 0.0, STEPS, timeout_s=400))
    sys.stderr.write(f"{layout}: busiest expert over the mean {even:.3f}, without a bias {uneven:.3f}\n")
    assert even <= BALANCED and uneven > UNBALANCED, (even, uneven)
