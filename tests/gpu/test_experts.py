"""Layers of experts on one GPU: beside the CPU, in 8 bits, and never waiting for the device."""

import copy

import pytest
import torch
from forge_model.config import MoEConfig, SigmoidRouterConfig, SoftmaxRouterConfig
from forge_parallel.fp8 import use_fp8
from forge_parallel.fp8_config import FP8Config
from forge_parallel.mesh import Mesh
from forge_parallel.plan import Plan
from gpu_device import DEVICE, needs_cuda
from torch import nn

pytestmark = pytest.mark.gpu
DIM = 256
NODES = SigmoidRouterConfig(groups=8, top_groups=4, sequence_balance_weight=0.1, z_loss_weight=0.01)
CONFIGS = {
    "sigmoid": MoEConfig(num_experts=64, top_k=8, dim=128, router=NODES, shared_experts=1),
    "capacity": MoEConfig(num_experts=64, top_k=8, dim=128, router=NODES, capacity_factor=1.0),
    "softmax": MoEConfig(
        num_experts=8, top_k=2, dim=128, router=SoftmaxRouterConfig(batch_balance_weight=0.1)
    ),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    layer = CONFIGS[name].build(DIM)
    for tensor in [*layer.parameters(), *layer.buffers()]:
        nn.init.normal_(tensor, std=0.05)
    return layer


def gradients(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    out = layer(x)
    out.square().mean().backward()
    found = [out.detach(), *(p.grad for p in layer.parameters())]
    layer.zero_grad()
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_layer_equals_the_cpu(name):
    layer, x = build(name), torch.randn(2, 64, DIM)
    # in float64, so that near ties fall alike; a layer goes to its device before it counts tokens
    other_layer = copy.deepcopy(layer.double()).to(DEVICE)
    reference, found = gradients(layer, x.double()), gradients(other_layer, x.double().to(DEVICE))
    for one, other in zip(found, reference, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-8, atol=1e-10)


@needs_cuda
@pytest.mark.parametrize("name", CONFIGS)
def test_routing_and_experts_never_wait_for_the_device(name):
    layer, x = build(name).to(DEVICE, torch.bfloat16), torch.randn(2, 512, DIM, device=DEVICE).bfloat16()
    gradients(layer, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = gradients(layer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(tensor.isfinite().all() for tensor in found)


def test_experts_in_eight_bits_stay_near_bfloat16():
    on_gpu = DEVICE.type == "cuda"
    if on_gpu and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    model = nn.Module()
    model.layers = nn.ModuleList([build("softmax").to(DEVICE, torch.bfloat16)])
    x = torch.randn(2, 512, DIM, device=DEVICE).bfloat16()
    reference = gradients(model.layers[0], x)
    config = FP8Config(recipe="rowwise", experts=True, min_size=128, emulate=not on_gpu)
    plan = Plan.of({"blocks": "layers.*", "experts": ["layers.*"]})
    assert "layers.0.experts" in use_fp8(model, plan, config, Mesh(DEVICE))
    found = gradients(model.layers[0], x)
    assert not torch.equal(found[0], reference[0])
    for one, other in zip(found, reference, strict=True):
        assert (one - other).norm() < 0.15 * other.norm()
