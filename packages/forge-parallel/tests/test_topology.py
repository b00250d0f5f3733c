"""What `[process_group]` asks of backends and of the places of ranks."""

import os

import pytest
import torch
from forge_config import ConfigError
from forge_parallel import Env, MeshConfig, build_mesh
from forge_parallel.capabilities import group_options
from forge_parallel.error import ParallelError
from forge_parallel.group_config import ProcessGroupConfig
from forge_parallel.testing import run_ranks
from forge_parallel.topology import require_within_node

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_backend_of_each_device_is_the_one_that_is_named(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name != "mpi")
    monkeypatch.setattr(torch.distributed.Backend, "backend_list", ["gloo", "nccl", "mpi"])

    def backend(device: torch.device, name: str) -> str:
        return group_options(device, False, ProcessGroupConfig(backend=name))["backend"]

    assert (backend(CPU, "auto"), backend(GPU, "auto")) == ("gloo", "cpu:gloo,cuda:nccl")
    assert backend(GPU, "nccl") == "cpu:gloo,cuda:nccl"
    assert backend(GPU, "cpu:gloo,cuda:gloo") == "cpu:gloo,cuda:gloo"
    assert backend(CPU, "gloo") == "cpu:gloo"
    with pytest.raises(
        ParallelError, match=r'backend = "mpi", and this torch .* has no mpi; it has gloo, nccl'
    ):
        backend(CPU, "mpi")
    with pytest.raises(ParallelError, match=r'"nccl" has nothing for tensors on a cpu'):
        backend(CPU, "nccl")
    with pytest.raises(ParallelError, match=r'"cpu:gloo" has nothing for tensors on a cuda'):
        backend(GPU, "cpu:gloo")


def test_nccl_is_refused_where_ranks_compute_on_a_cpu(monkeypatch):
    """Also beside gloo: torch makes all of the backends, and says that there is no GPU."""
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: True)
    with pytest.raises(ParallelError, match=r'"cpu:gloo,cuda:nccl" has NCCL.*compute on a cpu.*"auto"'):
        group_options(CPU, False, ProcessGroupConfig(backend="cpu:gloo,cuda:nccl"))


def test_high_priority_is_of_nccl_alone(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: True)
    monkeypatch.delenv("TORCH_NCCL_HIGH_PRIORITY", raising=False)
    config = ProcessGroupConfig(high_priority=True)
    with pytest.raises(ParallelError, match="compute on a cpu with gloo; set it to false"):
        group_options(CPU, False, config)
    assert "TORCH_NCCL_HIGH_PRIORITY" not in os.environ
    group_options(GPU, False, config)
    assert os.environ.pop("TORCH_NCCL_HIGH_PRIORITY") == "1"
    with pytest.raises((ConfigError, ValueError), match="high_priority = true is for NCCL"):
        ProcessGroupConfig(high_priority=True, backend="gloo")


@pytest.mark.parametrize(
    "wrong",
    ["", "cpu:gloo,nccl", "cpu:gloo,", "a:b:c", "cpu:", ":gloo", "cpu:gloo,cpu:nccl", "cpu:gloo, cuda:nccl"],
)
def test_backends_that_name_no_device_are_refused(wrong):
    with pytest.raises((ConfigError, ValueError), match="expected one name"):
        ProcessGroupConfig(backend=wrong)


def placed(sizes: dict, axes: list[str], names: list[str]) -> str:
    """What is said of ranks on nodes of these names."""
    env = Env.detect()
    mesh = build_mesh(MeshConfig(**sizes), env)
    try:
        require_within_node(mesh, axes, names[env.rank])
    except ParallelError as error:
        return str(error)
    return ""


BLOCKS, CYCLES = ["a", "a", "b", "b"], ["a", "b", "a", "b"]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("sizes", "axes", "names", "said"),
    [
        ({"tp": 2}, ["tp"], BLOCKS, ""),
        ({"tp": 2}, ["tp", "ep", "cp"], CYCLES, "the ranks 0, 1 of the axis tp are on the nodes a, b"),
        ({"tp": 2}, ["fsdp"], BLOCKS, "the ranks 0, 2 of the axis fsdp are on the nodes a, b"),
        ({"tp": 2}, ["fsdp"], CYCLES, ""),
        ({"ep": 2}, ["ep"], CYCLES, "the ranks 0, 1 of the axis ep are on the nodes a, b"),
        ({"ep": 2}, ["ep"], BLOCKS, ""),
        ({"cp": 4}, ["cp"], BLOCKS, "the ranks 0, 1, 2, 3 of the axis cp are on the nodes a, b"),
        ({"dp_replicate": 2}, ["fsdp"], BLOCKS, ""),
        # a rank whose own group is on one node hears of that of another rank
        ({"tp": 2}, ["tp"], ["a", "a", "b", "c"], "the ranks 2, 3 of the axis tp are on the nodes b, c"),
    ],
)
def test_axes_over_nodes_are_refused_on_every_rank(sizes, axes, names, said):
    for told in run_ranks(placed, 4, sizes, axes, names):
        assert told.startswith(said) and bool(told) == bool(said)
