"""What is saved under one layout is bit for bit what another one loads, and training goes on from there."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forge_ckpt import Store, TrainState
from forge_model import DecoderConfig
from forge_model.config import GroupedQueryConfig, LayerOverride, MoEConfig, SigmoidRouterConfig, SwiGLUConfig
from forge_parallel import ParallelConfig, local_shard
from forge_parallel.config import PipelineConfig
from forge_parallel.tensor import is_copy, local_part
from forge_parallel.testing import run_ranks
from msgspec.structs import replace
from parity import TOKENS, VOCAB, Made, batch, full, made

RANKS = 4
MODEL = DecoderConfig(
    vocab_size=VOCAB + 1,  # cut unevenly, and fewer key heads than four ranks
    dim=32,
    num_layers=4,
    max_tokens=TOKENS,
    attention=GroupedQueryConfig(num_heads=4, num_kv_heads=2, qk_norm=True, bias=True),
)
LAYOUTS = {
    "fsdp4": {},
    "replicate4": {"dp_replicate": 4},
    "hsdp2x2": {"dp_replicate": 2},
    "fsdp2-tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "fsdp2-cp2": {"cp": 2},
    "cp2-tp2": {"cp": 2, "tp": 2},
    "pp2-fsdp2": {"pp": 2},
    "pp2-tp2": {"pp": 2, "tp": 2},
    "pp2-cp2": {"pp": 2, "cp": 2},
    "pp2-fsdp2-looped": {"pp": 2},
    "pp2-tp2-v": {"pp": 2, "tp": 2},
}
SCHEDULES = {"looped": "interleaved_1f1b", "v": "dualpipe_v"}
EXPERTS = replace(
    MODEL,
    ffn=MoEConfig(
        num_experts=8, top_k=3, dim=24, router=SigmoidRouterConfig(bias_rate=0.02), shared_experts=1
    ),
    overrides=[LayerOverride(layers="0", ffn=SwiGLUConfig(dim=64))],
)
EXPERT_LAYOUTS = {
    "one-experts": (1, {}),
    "fsdp2-experts": (2, {}),
    "ep2": (2, {"ep": 2}),
    "ep4": (4, {"ep": 4}),
    "ep2-tp2": (4, {"ep": 2, "tp": 2}),
    "fsdp2-ep2": (4, {"ep": 2}),
    "cp2-ep2": (2, {"cp": 2, "ep": 2}),
    "pp2-ep2": (4, {"pp": 2, "ep": 2}),
}
TIED_LAYOUTS = {
    "one-tied": (1, {}),
    "pp2-fsdp2-tied": (4, {"pp": 2}),
    "pp2-tp2-tied": (4, {"pp": 2, "tp": 2}),
    "fsdp2-tied": (2, {}),
}
WORLDS = {
    "one": (1, {}),
    "fsdp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "fsdp3": (3, {}),
    "replicate3": (3, {"dp_replicate": 3}),
    "fsdp4": (4, {}),
}
"""Layouts of other numbers of ranks; on three, all shards are uneven."""
FEW = ("fsdp2-tp2", "pp2-cp2")


def build(layout: str, seed: int) -> Made:
    schedule = SCHEDULES.get(layout.rpartition("-")[2], "1f1b")
    parallel = ParallelConfig(pipeline=PipelineConfig(schedule=schedule))
    if layout in EXPERT_LAYOUTS:
        return made(EXPERT_LAYOUTS[layout][1], EXPERTS, "float32", parallel, seed)
    if layout in TIED_LAYOUTS:
        model = replace(MODEL, tie_embeddings=True)
        return made(TIED_LAYOUTS[layout][1], model, "float32", parallel, seed)
    sizes = WORLDS[layout][1] if layout in WORLDS else LAYOUTS[layout]
    return made(sizes, MODEL, "float32", parallel, seed)


def store(folder: str, layout: str, run: Made) -> Store:
    shard = partial(local_shard, mesh=run.mesh)
    return Store(Path(folder) / layout, group=run.mesh.control_group, local_shard=shard)


def state(run: Made) -> dict[str, torch.Tensor]:
    """Weights, moments and buffers, whole."""
    return full(TrainState(run.parts, run.optimizer).capture(copy=False).tensors)


def train(run: Made, first: int, last: int) -> list[float]:
    parts = 1 if dist.get_world_size() == 3 else 4  # 16 samples on 3 ranks: 6, 6 and 4
    return [run.step.train(batch(index, run.mesh, parts), index).loss.item() for index in range(first, last)]


def save(folder: str, layout: str) -> None:
    """Two steps, a save, two steps more; keeps beside it what was saved and the losses after it."""
    run = build(layout, seed=3)
    train(run, 0, 2)
    store(folder, layout, run).save(2, TrainState(run.parts, run.optimizer, is_copy).capture())
    saved = state(run)
    losses = train(run, 2, 4)
    if dist.get_rank() == 0:
        torch.save((saved, losses), Path(folder) / f"{layout}.pt")


def load(folder: str, first: str, second: str) -> None:
    """What was saved under the first layout, under the second."""
    saved, losses = torch.load(Path(folder) / f"{first}.pt")
    run = build(second, seed=4)
    for part in run.parts:
        for parameter in part.parameters():
            local_part(parameter).data.fill_(float("nan"))
        for buffer in part.buffers():
            buffer.fill_(float("nan"))
    found = store(folder, first, run).resume(TrainState(run.parts, run.optimizer).targets)
    assert found is not None and found.step == 2
    loaded = state(run)
    assert loaded.keys() == saved.keys()
    for key, value in saved.items():
        assert torch.equal(loaded[key], value), key
    assert train(run, 2, 4) == pytest.approx(losses, rel=1e-5)


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "first", [pytest.param(name, marks=[] if name in FEW else [pytest.mark.slow]) for name in LAYOUTS]
)
def test_what_one_layout_saves_any_other_loads_bit_for_bit(tmp_path, first, request):
    run_ranks(save, RANKS, str(tmp_path), first, timeout_s=120)
    others = [name for name in FEW if name != first]
    for second in LAYOUTS if request.config.getoption("--slow") else others:
        run_ranks(load, RANKS, str(tmp_path), first, second, timeout_s=120)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", EXPERT_LAYOUTS)
def test_experts_that_one_layout_saves_any_other_loads_bit_for_bit(tmp_path, first):
    run_ranks(save, EXPERT_LAYOUTS[first][0], str(tmp_path), first, timeout_s=120)
    for second, (ranks, _) in EXPERT_LAYOUTS.items():
        run_ranks(load, ranks, str(tmp_path), first, second, timeout_s=120)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", WORLDS)
def test_what_some_ranks_save_any_other_number_loads_bit_for_bit(tmp_path, first):
    run_ranks(save, WORLDS[first][0], str(tmp_path), first, timeout_s=120)
    for second, (ranks, _) in WORLDS.items():
        run_ranks(load, ranks, str(tmp_path), first, second, timeout_s=120)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", TIED_LAYOUTS)
def test_tied_embeddings_that_one_layout_saves_any_other_loads_bit_for_bit(tmp_path, first):
    """In a pipeline two stages have the embedding, and one of them writes it."""
    run_ranks(save, TIED_LAYOUTS[first][0], str(tmp_path), first, timeout_s=120)
    for second, (ranks, _) in TIED_LAYOUTS.items():
        run_ranks(load, ranks, str(tmp_path), first, second, timeout_s=120)
