"""A model under FSDP2 over tensor parallelism is saved, and loaded under other layouts."""

from functools import partial
from pathlib import Path

import pytest
import torch
from forge_ckpt import Store, TrainState
from forge_ckpt.error import CheckpointError
from forge_parallel import Env, MeshConfig, build_mesh, local_shard
from forge_parallel.testing import run_ranks
from torch import nn

pytestmark = pytest.mark.dist


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A module after one step, the same on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 14), nn.Linear(14, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def cut(model: nn.Module) -> nn.Module:
    """Tensor parallelism on 2 ranks, FSDP2 on the 2 others; 7 rows a rank that 2 does not divide."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, grid["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=grid["data"])
    return model


def round_trip(folder: str) -> None:
    """Saved under this layout, loaded into one plain module, and under this layout again."""
    mesh = build_mesh(MeshConfig(), Env.detect())
    shard = partial(local_shard, mesh=mesh)
    model = cut(trained()[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    state = TrainState([model], optimizer)
    with pytest.raises(CheckpointError, match=r"DTensor.*local_shard="):
        Store(Path(folder) / "refused", group=mesh.control_group).save(1, state.capture(copy=False))
    store = Store(Path(folder), group=mesh.control_group, local_shard=shard)
    store.save(1, state.capture(copy=False))

    plain, of_plain = trained()
    loaded = TrainState([plain], of_plain)
    assert Store(Path(folder), group=mesh.control_group).resume(loaded.targets) is not None
    again = cut(trained()[0])
    anew = TrainState([again], torch.optim.AdamW(again.parameters(), lr=0.1))
    assert store.resume(anew.targets) is not None
    for name, tensor in state.capture(copy=False).tensors.items():
        values, offsets, _ = local_shard(tensor)
        box = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
        assert torch.equal(values, loaded.capture(copy=False).tensors[name].detach()[box]), name
        assert torch.equal(values, local_shard(anew.capture(copy=False).tensors[name]).values), name


def test_checkpoint_under_fsdp_over_tensor_parallelism_loads_plain_and_sharded(tmp_path):
    run_ranks(round_trip, 4, str(tmp_path), timeout_s=200)


def replicated(folder: str) -> list[int]:
    """Under HSDP; returns the bytes that each rank wrote."""
    mesh = build_mesh(MeshConfig(dp_replicate=2, dp_shard=2), Env.detect())
    from torch.distributed.fsdp import fully_shard

    model = trained()[0]
    fully_shard(model, mesh=mesh.fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    state = TrainState([model], optimizer)
    store = Store(Path(folder), group=mesh.control_group, local_shard=partial(local_shard, mesh=mesh))
    store.save(1, state.capture(copy=False))
    plain, of_plain = trained()
    loaded = TrainState([plain], of_plain)
    assert Store(Path(folder), group=mesh.control_group).resume(loaded.targets) is not None
    for name, tensor in state.capture(copy=False).tensors.items():
        values, offsets, _ = local_shard(tensor)
        box = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
        assert torch.equal(values, loaded.capture(copy=False).tensors[name].detach()[box]), name
    return [file.num_bytes for file in store.newest().files]


def test_replicas_share_the_writing(tmp_path):
    wrote = run_ranks(replicated, 4, str(tmp_path), timeout_s=200)[0]
    assert all(0 < num_bytes < 0.4 * sum(wrote) for num_bytes in wrote)
