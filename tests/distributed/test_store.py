"""A checkpoint that fails on one rank of several: all ranks hear of it and do the same."""

import os
from pathlib import Path

import forge_ckpt.shards
import pytest
import torch
import torch.distributed as dist
from forge_ckpt import CheckpointError, Store
from forge_parallel.testing import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.dist
LAYOUTS = {"fsdp2": (2, (2,)), "hsdp2x2": (4, (2, 2))}


def values(step: int) -> torch.Tensor:
    return torch.arange(10, dtype=torch.float32).view(5, 2) + 100 * step


def sharded(shape: tuple[int, ...], whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """The rows shared out along the last axis, the same along others."""
    mesh = init_device_mesh("cpu", shape)
    return {"w": distribute_tensor(whole, mesh, [*[Replicate()] * (len(shape) - 1), Shard(0)])}


def gathered(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    assert isinstance(tensors["w"], DTensor)
    return tensors["w"].full_tensor()


def resume(store: Store, shape: tuple[int, ...]) -> tuple[int, bool]:
    """The step that is found, and whether the values are those of it."""
    into = sharded(shape, torch.zeros(5, 2))
    found = store.resume(lambda held: into)
    assert found is not None
    return found.step, torch.equal(gathered(into), values(found.step))


def save_failing_on(root: Path, shape: tuple[int, ...], bad: int) -> tuple[str, tuple, tuple]:
    store, write = Store(root, group=dist.group.WORLD), forge_ckpt.shards.write_boxes
    store.save(1, sharded(shape, values(1)), {})

    def fail(*arguments):
        raise OSError("the disk is gone")

    if dist.get_rank() == bad:
        forge_ckpt.shards.write_boxes = fail
    try:
        with pytest.raises(CheckpointError) as caught:
            store.save(2, sharded(shape, values(2)), {})
    finally:
        forge_ckpt.shards.write_boxes = write
    after = resume(store, shape)
    store.save(2, sharded(shape, values(2)), {})
    return str(caught.value), after, resume(store, shape)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_save_that_fails_on_one_rank_fails_on_all_and_can_be_repeated(tmp_path: Path, layout: str):
    ranks, shape = LAYOUTS[layout]
    expected = f"step 2 could not be saved: rank {ranks - 1}: OSError: the disk is gone"
    answers = run_ranks(save_failing_on, ranks, tmp_path, shape, ranks - 1)
    assert answers == [(expected, (1, True), (2, True))] * ranks
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def publish_failing(root: Path, shape: tuple[int, ...]) -> tuple[str, tuple]:
    store, rename = Store(root, group=dist.group.WORLD), os.rename
    store.save(1, sharded(shape, values(1)), {})

    def fail(*paths):
        raise OSError("the disk is gone")

    os.rename = fail
    try:
        with pytest.raises(CheckpointError) as caught:
            store.save(2, sharded(shape, values(2)), {})
    finally:
        os.rename = rename
    return str(caught.value), resume(store, shape)


def test_publishing_that_fails_on_the_first_rank_fails_on_all(tmp_path: Path):
    answers = run_ranks(publish_failing, 2, tmp_path, (2,))
    assert answers == [("OSError: the disk is gone", (1, True))] * 2


def save_twice(root: Path, shape: tuple[int, ...]) -> None:
    store = Store(root, group=dist.group.WORLD)
    for step in (1, 2):
        store.save(step, sharded(shape, values(step)), {})


def resume_it(root: Path, shape: tuple[int, ...]) -> tuple[int, bool]:
    return resume(Store(root, group=dist.group.WORLD), shape)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", ["flipped", "cut"])
def test_damage_that_one_rank_meets_makes_all_take_the_older_one(tmp_path: Path, layout: str, how: str):
    ranks, shape = LAYOUTS[layout]
    run_ranks(save_twice, ranks, tmp_path, shape)
    file = tmp_path / "step-000000002" / "rank-00001.bin"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if how == "flipped" else data[:-1])
    assert run_ranks(resume_it, ranks, tmp_path, shape) == [(1, True)] * ranks
    assert len(list(tmp_path.glob(".bad-000000002-*"))) == 1


def test_hsdp_writes_each_part_once_and_loads_on_fsdp(tmp_path: Path):
    run_ranks(save_twice, 4, tmp_path, (2, 2))
    sizes = [file.stat().st_size for file in sorted((tmp_path / "step-000000002").glob("rank-*"))]
    assert sizes == [24, 16, 0, 0]
    assert run_ranks(resume_it, 2, tmp_path, (2,)) == [(2, True)] * 2
