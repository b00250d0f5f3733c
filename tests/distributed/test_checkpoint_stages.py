"""Ranks that hold different parts of a model save one checkpoint, which loads under any other cut."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forge_ckpt import CheckpointError, Saver, Snapshot, Store, TrainState
from forge_parallel.testing import run_ranks
from torch import nn

pytestmark = pytest.mark.dist

LAYERS = 4


class Part(nn.Module):
    """Some of the layers of a model, under the names that they have in it."""

    def __init__(self, layers: list[int]):
        super().__init__()
        torch.manual_seed(1)
        every = [nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(LAYERS)]
        self.layers = nn.ModuleDict({str(index): every[index] for index in layers})


class Counting(torch.optim.AdamW):
    """AdamW that keeps numbers in its groups and beside tensors too."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


def made(*cuts: list[int]) -> tuple[list[Part], Counting, TrainState]:
    parts = [Part(layers) for layers in cuts]
    optimizer = Counting([p for part in parts for p in part.parameters()], lr=0.1)
    return parts, optimizer, TrainState(parts, optimizer)


def train(parts: list[Part], optimizer: Counting, first: int, last: int) -> None:
    """Each layer on its own, so that each rank can compute what all would."""
    for step in range(first, last):
        for part in parts:
            for name, layer in part.layers.items():
                x = torch.randn(8, 5, generator=torch.Generator().manual_seed(10 * step + int(name)))
                layer(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


CUTS = {
    "whole": [[[0, 1, 2, 3]], [[0, 1, 2, 3]]],
    "halves": [[[0, 1]], [[2, 3]]],
    "looped": [[[0], [2]], [[1], [3]]],
    "uneven": [[[3], [1, 2]], [[0]]],
}


def round_trip(folder: str) -> None:
    """Every cut is saved, and loaded under every other; what follows is what an unbroken run would do."""
    rank = dist.get_rank()
    for first, cut in CUTS.items():
        parts, optimizer, state = made(*cut[rank])
        train(parts, optimizer, 0, 2)
        Store(Path(folder) / first, group=dist.group.WORLD).save(2, state.capture({"from": first}))
        for second, other in CUTS.items():
            parts, optimizer, state = made(*other[rank])
            found = Store(Path(folder) / first, group=dist.group.WORLD).resume(state.targets)
            assert found is not None and found.meta == {"from": first}
            state.restore(found.values)
            train(parts, optimizer, 2, 4)
            reference, its_optimizer, expected = made(*other[rank])
            train(reference, its_optimizer, 0, 4)
            now, then = state.capture(), expected.capture()
            assert now.values == then.values and now.tensors.keys() == then.tensors.keys(), (first, second)
            for key, value in now.tensors.items():
                assert torch.equal(value, then.tensors[key]), (first, second, key)


def test_stages_load_as_a_whole_and_a_whole_as_stages(tmp_path):
    run_ranks(round_trip, 2, str(tmp_path))


def refuse(folder: str) -> None:
    rank = dist.get_rank()
    store = Store(Path(folder), group=dist.group.WORLD)
    parts, optimizer, state = made([2 * rank, 2 * rank + 1])
    train(parts, optimizer, 0, 1)
    store.save(1, state.capture())
    with pytest.raises(CheckpointError, match=r"model.layers.3.0.weight is not wanted"):
        store.resume(made([[0, 1], [2]][rank])[2].targets)
    with pytest.raises(CheckpointError, match=r"model.x is not in the checkpoint"):
        wanted = made([0, 1, 2, 3])[2].targets
        store.resume(lambda held: dict(wanted(held)) | ({"model.x": torch.zeros(1)} if rank else {}))
    with pytest.raises(CheckpointError, match=r"ZeroDivisionError"):
        store.resume(lambda held: wanted(held) if rank else 1 / 0)
    with pytest.raises(CheckpointError, match=r"w is float32 \[2\] on one rank, and float32 \[1\]"):
        store.save(2, Snapshot({"w": torch.zeros(1 + rank)}))
    with pytest.raises(CheckpointError, match=r"count is 1 on one rank, and 0"):
        store.save(2, Snapshot({}, values={"count": rank}))
    assert store.steps() == [1]


def test_parts_that_are_not_all_of_it_are_refused_on_all_ranks(tmp_path):
    run_ranks(refuse, 2, str(tmp_path))


def beside(folder: str) -> None:
    """Saves beside training, whose collectives run on another group; one rank fails to write once."""
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    store = Store(Path(folder), keep=9, group=group)
    parts, optimizer, state = made([2 * rank, 2 * rank + 1])
    saver = Saver(store, state, asynchronous=True)
    original = store._write

    def fail_once(partial, boxes):
        if rank == 1 and "-000000003-" in partial.name:
            raise OSError("no room")
        return original(partial, boxes)

    store._write = fail_once
    expected = {}
    for step in range(1, 6):
        train(parts, optimizer, step, step + 1)
        saver.save(step, {"step": step})
        expected[step] = {key: value.clone() for key, value in state.capture().tensors.items()}
        for _ in range(50):
            dist.all_reduce(torch.ones(1))
    saver.finish()
    assert store.steps() == [1, 2, 4, 5] and saver.failures == 0
    dist.barrier()
    for step in store.steps():
        saved = store.tensors(step)
        assert all(torch.equal(saved[key], value) for key, value in expected[step].items())


def test_saves_beside_training_do_not_meet_its_collectives(tmp_path):
    run_ranks(beside, 2, str(tmp_path))
