"""NCCL with one rank: the backend that no CPU has, and what is done over it."""

import pytest
import torch
import torch.distributed as dist
from forge_parallel import Env, MeshConfig, build_mesh, process_group
from forge_parallel.collectives import all_gather, all_reduce, all_to_all, copy_to_ranks, reduce_scatter
from gpu_device import DEVICE, needs_cuda

pytestmark = pytest.mark.gpu


@pytest.fixture
def group():
    with process_group(Env(0, 0, 1, DEVICE, "none"), needed=True):
        yield dist.group.WORLD


@needs_cuda
def test_each_device_has_its_backend(group):
    on_gpu, on_cpu = torch.ones(3, device=DEVICE), torch.ones(3)
    dist.all_reduce(on_gpu)
    dist.all_reduce(on_cpu)
    assert on_gpu.tolist() == on_cpu.tolist() == [1.0] * 3
    assert "nccl" in str(dist.get_backend_config(group)) and "gloo" in str(dist.get_backend_config(group))


def test_control_group_is_on_the_host(group):
    mesh = build_mesh(MeshConfig(), Env(0, 0, 1, DEVICE, "none"))
    assert dist.get_backend(mesh.control_group) == "gloo"
    assert mesh.device == DEVICE and mesh.fsdp is not None and mesh.fsdp.device_type == DEVICE.type


def test_collectives_of_one_rank_are_the_identity_and_so_are_their_gradients(group):
    for say in (
        lambda x: all_gather(x, 0, group),
        lambda x: reduce_scatter(x, 0, group),
        lambda x: all_reduce(x, group),
        lambda x: copy_to_ranks(x, group),
        lambda x: all_to_all(x, 1, 0, group),
    ):
        x = torch.randn(4, 6, device=DEVICE, requires_grad=True)
        out = say(x)
        out.square().sum().backward()
        assert torch.equal(out, x) and torch.equal(x.grad, 2 * x)
