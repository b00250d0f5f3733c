"""Replicas read a checkpoint once, all of them together, and each has every bit of it."""

import errno
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forge_ckpt import Snapshot, Store, shards
from forge_parallel import local_shard
from forge_parallel.testing import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

SHAPE = (2048, 1024)


def tensors(step: int) -> dict[str, torch.Tensor]:
    """Some 46 MB, of many kinds."""
    draw = torch.Generator().manual_seed(step)
    made = {f"w{number:02d}": torch.randn(SHAPE, generator=draw) for number in range(5)}
    made["half"] = torch.randn(SHAPE, generator=draw).bfloat16()
    made["flags"] = torch.randn(1000, generator=draw) > 0
    return made | {"count": torch.tensor(float(step)), "nothing": torch.zeros(0, 3)}


def load(folder: str, hsdp: bool, broken: bool) -> None:
    """Load the newest checkpoint and look at every bit, and at how much all ranks have read."""
    read, original = [], shards._read_blocks

    def counted(file, path, first, last, *rest):
        if broken and dist.get_rank() == 1 and "step-000000002" in str(path):
            raise OSError(errno.EIO, "of the test")
        read.append(last - first)
        return original(file, path, first, last, *rest)

    targets = {key: torch.full_like(value, 1) for key, value in tensors(0).items()}
    step = 1 if broken else 2
    if hsdp:
        mesh, place = init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)]
        targets = {key: distribute_tensor(t, mesh, place) if t.ndim == 2 else t for key, t in targets.items()}
    shards._read_blocks = counted
    try:
        group = dist.new_group(backend="gloo")
        found = Store(Path(folder), group=group, local_shard=local_shard).resume(lambda held: targets)
    finally:
        shards._read_blocks = original
    assert found is not None and found.step == step
    for key, value in tensors(step).items():
        here = targets[key].full_tensor() if hsdp and value.ndim == 2 else targets[key]
        assert torch.equal(here, value), key
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sum(read))
    size = (Path(folder) / f"step-{step:09d}" / "rank-00000.bin").stat().st_size
    assert broken or (sum(everyone) < 1.15 * size and max(everyone) < 1.6 * size / len(everyone)), everyone


@pytest.fixture
def folder(tmp_path):
    for step in (1, 2):
        Store(tmp_path).save(step, Snapshot(tensors(step)))
    return tmp_path


@pytest.mark.parametrize(("ranks", "hsdp"), [(2, False), (3, False), (4, True)])
def test_replicas_read_a_checkpoint_once_and_have_all_of_it(folder, ranks, hsdp):
    run_ranks(load, ranks, str(folder), hsdp, False, timeout_s=120)


def test_replicas_take_the_older_checkpoint_together_when_one_of_them_cannot_read(folder):
    run_ranks(load, 3, str(folder), False, True, timeout_s=120)
    assert Store(folder).steps() == [1, 2]
