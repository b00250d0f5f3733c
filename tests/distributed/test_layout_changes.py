"""What is saved under one layout is bit for bit what another one loads, and training goes on from there."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forge_ckpt import Store, TrainState
from forge_model import DecoderConfig
from forge_model.attention_config import GroupedQueryConfig
from forge_parallel import ParallelConfig, local_shard
from forge_parallel.config import PipelineConfig
from forge_parallel.tensor import local_part
from forge_parallel.testing import run_ranks
from parity import TOKENS, VOCAB, Made, batch, full, made

RANKS = 4
MODEL = DecoderConfig(
    vocab_size=VOCAB,
    dim=32,
    num_layers=4,
    max_tokens=TOKENS,
    attention=GroupedQueryConfig(num_heads=4, num_kv_heads=4, qk_norm=True, bias=True),
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
FEW = ("fsdp2-tp2", "pp2-cp2", "pp2-fsdp2-looped")


def build(layout: str, seed: int) -> Made:
    schedule = SCHEDULES.get(layout.rpartition("-")[2], "1f1b")
    parallel = ParallelConfig(pipeline=PipelineConfig(schedule=schedule))
    return made(LAYOUTS[layout], MODEL, "float32", parallel, seed)


def store(folder: str, layout: str, run: Made) -> Store:
    shard = partial(local_shard, mesh=run.mesh)
    return Store(Path(folder) / layout, group=run.mesh.control_group, local_shard=shard)


def state(run: Made) -> dict[str, torch.Tensor]:
    """Weights and moments, whole."""
    return full(TrainState(run.parts, run.optimizer).capture(copy=False).tensors)


def train(run: Made, first: int, last: int) -> list[float]:
    return [run.step.train(batch(index, run.mesh, 4), index).loss.item() for index in range(first, last)]


def every_pair(folder: str, layouts: list[str]) -> None:
    """Saves under each layout, and loads under each."""
    saved, losses = {}, {}
    for layout in layouts:
        run = build(layout, seed=3)
        train(run, 0, 2)
        store(folder, layout, run).save(2, TrainState(run.parts, run.optimizer).capture())
        saved[layout], losses[layout] = state(run), train(run, 2, 4)
    for first in layouts:
        for second in layouts:
            run = build(second, seed=4)
            for part in run.parts:
                for parameter in part.parameters():
                    local_part(parameter).data.fill_(float("nan"))
            found = store(folder, first, run).resume(TrainState(run.parts, run.optimizer).targets)
            assert found is not None and found.step == 2
            loaded = state(run)
            assert loaded.keys() == saved[first].keys(), (first, second)
            for key, value in saved[first].items():
                assert torch.equal(loaded[key], value), (first, second, key)
            assert train(run, 2, 4) == pytest.approx(losses[first], rel=1e-5), (first, second)
            dist.barrier()


@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "layouts", [FEW, pytest.param(tuple(LAYOUTS), marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_what_one_layout_saves_any_other_loads_bit_for_bit(tmp_path, layouts):
    run_ranks(every_pair, RANKS, str(tmp_path), list(layouts), timeout_s=800)
