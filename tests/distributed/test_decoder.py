"""Our decoder with the trainer's own step, on real gloo ranks, against one process."""

from functools import partial
from pathlib import Path

import pytest
import torch
from forge_ckpt import Store, TrainState
from forge_model import DecoderConfig
from forge_model.attention.config import GroupedQueryConfig
from forge_parallel import local_shard
from forge_parallel.tensor import local_part
from forge_parallel.testing import run_ranks
from parity import TOKENS, VOCAB, Made, batch, made

LAYOUTS = {"fsdp2": (2, {}), "fsdp4": (4, {}), "hsdp2x2": (4, {"dp_replicate": 2, "dp_shard": 2})}
SAVED = {"lone": (1, {}), **LAYOUTS, "fsdp2-tp2": (4, {"tp": 2})}
LOADED = {"lone": (1, {}), "fsdp2": (2, {}), "fsdp4": (4, {}), "tp2": (2, {"tp": 2})}
MODEL = DecoderConfig(
    vocab_size=VOCAB,
    dim=32,
    num_layers=3,
    max_tokens=TOKENS,
    attention=GroupedQueryConfig(num_heads=4, num_kv_heads=2, qk_norm=True),
)


def spoil_gradient(module, inputs, output):
    """Leaves the forward pass as it is and makes the gradient infinite."""
    output.register_hook(lambda gradient: gradient * float("inf"))


def poisoned(where: str) -> list[bool]:
    """Three good steps, one with a NaN on the last rank, one good: did the bad one leave any bit behind?"""
    (model,), optimizer, step, mesh = made({}, MODEL, "float32")
    for index in range(3):
        step.train(batch(index, mesh), index)
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


def store(folder: str, run: Made) -> Store:
    shard = partial(local_shard, mesh=run.mesh)
    return Store(Path(folder), group=run.mesh.control_group, local_shard=shard)


def train(run: Made, first: int, last: int) -> list[float]:
    return [run.step.train(batch(index, run.mesh), index).loss.item() for index in range(first, last)]


def saved(folder: str, sizes: dict, steps: int) -> list[float]:
    """Train, save, and train on; the losses after the save."""
    run = made(sizes, MODEL, "float32")
    train(run, 0, steps)
    store(folder, run).save(steps, TrainState(run.parts, run.optimizer).capture())
    return train(run, steps, steps + 4)


def loaded(folder: str, sizes: dict, steps: int) -> list[float]:
    run = made(sizes, MODEL, "float32")
    for parameter in run.parts[0].parameters():
        local_part(parameter).fill_(float("nan"))
    found = store(folder, run).resume(TrainState(run.parts, run.optimizer).targets)
    assert found is not None and found.step == steps
    return train(run, steps, steps + 4)


QUICK = {("lone", "tp2"), ("fsdp4", "fsdp2"), ("fsdp2", "fsdp2")}
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
