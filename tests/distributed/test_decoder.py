"""Our decoder with the trainer's own step, on real gloo ranks, against one process."""

from functools import partial
from pathlib import Path

import pytest
import torch
from forge_ckpt import Store, TrainState
from forge_data.loader import MicroBatch
from forge_model import DecoderConfig, LossConfig, initialize
from forge_model.config import GroupedQueryConfig
from forge_parallel import (
    ActivationCheckpointingConfig,
    Env,
    Mesh,
    MeshConfig,
    ParallelConfig,
    Plan,
    build_mesh,
    local_shard,
    materialize,
    parallelize,
)
from forge_parallel.tensor import local_part
from forge_parallel.testing import run_ranks
from forge_trainer.optim import AdamWConfig, trainable
from forge_trainer.progress import Progress
from forge_trainer.schedule import CosineConfig
from forge_trainer.steps.text import TextStep
from forge_trainer.steps.update import Update

VOCAB, TOKENS, GLOBAL = 68, 16, 16
LAYOUTS = {"fsdp2": (2, {}), "fsdp4": (4, {}), "hsdp2x2": (4, {"dp_replicate": 2, "dp_shard": 2})}
SAVED = {"lone": (1, {}), **LAYOUTS, "fsdp2-tp2": (4, {"tp": 2})}
LOADED = {"lone": (1, {}), "fsdp2": (2, {}), "fsdp4": (4, {}), "tp2": (2, {"tp": 2})}


def build(sizes: dict, tied: bool = False, checkpointing: str = "none", clip_norm: float = 0.5):
    """A step on a small decoder, and what it is made of."""
    env = Env.detect()
    mesh = build_mesh(MeshConfig(**sizes), env) if env.world_size > 1 else Mesh(env.device)
    attention = GroupedQueryConfig(num_heads=4, num_kv_heads=2, qk_norm=True)
    config = DecoderConfig(
        vocab_size=VOCAB, dim=32, num_layers=3, max_tokens=TOKENS, tie_embeddings=tied, attention=attention
    )
    with torch.device("meta"):
        model = config.build()
    config = ParallelConfig(activation_checkpointing=ActivationCheckpointingConfig(mode=checkpointing))
    parallelize(model, mesh, Plan.of(model), config)
    materialize(model, torch.device("cpu"))
    initialize(model, 3, local_shard)
    optimizer = AdamWConfig(lr=1e-2).build(trainable([model]))
    factor = partial(CosineConfig(warmup_steps=2).factor, steps=20)
    update = Update([model], optimizer, factor, clip_norm, mesh)
    step = TextStep([model], LossConfig(chunk_tokens=5, z_loss_weight=1e-3).build(), mesh, update=update)
    return step, model, optimizer, Progress(), mesh


def batch(index: int, mesh) -> list[MicroBatch]:
    """This rank's part of a global batch in which every sequence has another count of valid targets."""
    generator = torch.Generator().manual_seed(index)
    rows = torch.randint(VOCAB, (GLOBAL, TOKENS + 1), generator=generator)
    labels = rows[:, 1:].clone()
    for row in range(GLOBAL):
        labels[row, : row % (TOKENS + 1)] = -100
    mine = torch.arange(GLOBAL).chunk(mesh.batch.size)[mesh.batch.rank]
    return [
        MicroBatch(
            {"tokens": rows[part, :-1], "labels": labels[part]}, {"targets": (labels[part] >= 0).sum()}
        )
        for part in mine.chunk(2)
    ]


def spoil_gradient(module, inputs, output):
    """Leaves the forward pass as it is and makes the gradient infinite."""
    output.register_hook(lambda gradient: gradient * float("inf"))


def poisoned(where: str) -> list[bool]:
    """Three good steps, one with a NaN on the last rank, one good: did the bad one leave any bit behind?"""
    step, model, optimizer, progress, mesh = build({})
    for index in range(3):
        progress.advance(step.train(batch(index, mesh), index))
    state = TrainState([model], optimizer)
    before = {key: local_part(value).clone() for key, value in state.capture(copy=False).tensors.items()}
    handles = []
    if mesh.batch.rank == mesh.batch.size - 1:
        if where == "loss":
            good = step.loss_fn
            step.loss_fn = lambda h, w, y: (lambda t: t._replace(total=t.total * float("nan")))(good(h, w, y))
        else:
            handles.append(model.layers["1"].register_forward_hook(spoil_gradient))
    out = step.train(batch(3, mesh), 3)
    untouched = all(
        torch.equal(local_part(v), before[k]) for k, v in state.capture(copy=False).tensors.items()
    )
    finite = bool(out.finite)
    for handle in handles:
        handle.remove()
    if where == "loss" and mesh.batch.rank == mesh.batch.size - 1:
        step.loss_fn = good
    after = step.train(batch(4, mesh), 4)
    moved = any(
        not torch.equal(local_part(v), before[k]) for k, v in state.capture(copy=False).tensors.items()
    )
    return [untouched, finite, bool(after.finite), moved]


@pytest.mark.dist
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_nan_on_one_rank_reaches_no_parameter_on_any(world_size, where):
    assert run_ranks(poisoned, world_size, where) == [[True, False, True, True]] * world_size


def store(folder: str, mesh) -> Store:
    return Store(Path(folder), group=mesh.control_group, local_shard=partial(local_shard, mesh=mesh))


def saved(folder: str, sizes: dict, steps: int) -> list[float]:
    """Train, save, and train on; the losses after the save."""
    step, model, optimizer, progress, mesh = build(sizes)
    for index in range(steps):
        progress.advance(step.train(batch(index, mesh), index))
    store(folder, mesh).save(steps, TrainState([model], optimizer).capture())
    return goes_on(step, progress, mesh, steps)


def loaded(folder: str, sizes: dict, steps: int) -> list[float]:
    step, model, optimizer, progress, mesh = build(sizes)
    for parameter in model.parameters():
        local_part(parameter).fill_(float("nan"))
    found = store(folder, mesh).resume(TrainState([model], optimizer).targets)
    assert found is not None
    progress.step = found.step
    return goes_on(step, progress, mesh, steps)


def goes_on(step, progress, mesh, first: int) -> list[float]:
    losses = []
    for index in range(first, first + 4):
        out = step.train(batch(index, mesh), index)
        progress.advance(out)
        losses.append(out.loss.item())
    return losses


QUICK = {("fsdp2-tp2", "lone"), ("lone", "tp2"), ("fsdp4", "fsdp2"), ("hsdp2x2", "fsdp4"), ("fsdp2", "fsdp2")}
PAIRS = [
    pytest.param(
        source,
        target,
        id=f"{source}-to-{target}",
        marks=[] if (source, target) in QUICK else [pytest.mark.slow],
    )
    for source in SAVED
    for target in LOADED
]


@pytest.mark.dist
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_checkpoint_of_one_layout_goes_on_under_another(tmp_path, source, target):
    expected = run_ranks(saved, SAVED[source][0], str(tmp_path), SAVED[source][1], 3)[0]
    for losses in run_ranks(loaded, LOADED[target][0], str(tmp_path), LOADED[target][1], 3):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert losses == expected or target != source
