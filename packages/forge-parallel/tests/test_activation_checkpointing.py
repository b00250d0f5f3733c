from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from forge_parallel.activation_checkpointing import checkpoint_activations
from forge_parallel.compile import compile_blocks
from forge_parallel.compile_config import CompileConfig
from forge_parallel.config import ActivationCheckpointingConfig
from forge_parallel.mesh import Mesh
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x, scale=1.0):
        self.calls += 1
        return torch.nn.functional.dropout(self.linear(x).relu(), 0.5) * scale


def gradient(block: Counted) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.ones(4, 3, requires_grad=True)
    block(block(x), scale=2.0).sum().backward()
    assert x.grad is not None
    return x.grad


def test_checkpoint_activations_runs_forward_twice_with_the_same_gradients_and_names():
    torch.manual_seed(1)
    block = Counted()
    names, plain, once = list(block.state_dict()), gradient(block), block.calls
    checkpoint_activations([block], ActivationCheckpointingConfig(mode="full"))
    assert torch.equal(gradient(block), plain)
    assert block.calls - once == 2 * once
    assert list(block.state_dict()) == names


def test_compile_blocks_compiles_equal_blocks_once():
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounter()
    blocks = [nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(12)]
    x = torch.ones(2, 3)
    wanted = [block(x) for block in blocks]
    checkpoint_activations(blocks, ActivationCheckpointingConfig(mode="full"))
    compile_blocks(blocks, CompileConfig(enabled=True, backend=counter), Mesh(torch.device("cpu")))  # type: ignore[arg-type]
    assert all(torch.equal(block(x), w) for block, w in zip(blocks, wanted, strict=True))
    assert counter.frame_count == 1


class Attending(nn.Module):
    """A block with matmuls, attention and cheap operations."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 16)).movedim(-3, 0).transpose(2, 3)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + F.gelu(self.out(out.transpose(1, 2).flatten(-2)))


def cost(mode: str) -> tuple[list[torch.Tensor], int, int]:
    """Gradients, FLOPs of forward and backward, and bytes of activations kept outside of what recomputes."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Attending() for _ in range(4)))
    checkpoint_activations(blocks, ActivationCheckpointingConfig(mode=mode))  # type: ignore[arg-type]
    own = {parameter.untyped_storage().data_ptr() for parameter in blocks.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor):
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            kept[place] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(2, 64, 32, requires_grad=True)
    with FlopCounterMode(display=False) as flops:
        watched = saved_tensors_hooks(pack, lambda tensor: tensor)
        with nullcontext() if mode == "selective" else watched:  # torch warns of both together
            out = blocks(x).square().sum()
        out.backward()
    return [x.grad, *(p.grad for p in blocks.parameters())], flops.get_total_flops(), sum(kept.values())


def test_modes_compute_again_what_they_say_with_the_same_gradients():
    plain, flops, kept = cost("none")
    found = {mode: cost(mode) for mode in ("full", "every", "selective", "offload")}
    for gradients, _, _ in found.values():
        assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))
    # the backward pass costs twice the forward: full recomputation makes 3 units 4
    forward = flops / 3
    assert found["full"][1] == pytest.approx(flops + forward, rel=0.08)
    assert found["every"][1] == pytest.approx(flops + forward / 2, rel=0.08)
    assert found["selective"][1] == found["offload"][1] == flops
    assert found["full"][2] < found["every"][2] < kept


def test_offload_keeps_activations_of_every_block_outside_of_the_graph():
    _, _, kept = cost("none")
    _, _, left = cost("offload")
    assert left < 0.2 * kept


def test_selective_keeps_what_is_dear_and_recomputes_the_rest():
    calls = []
    block = Attending()
    block.norm.register_forward_hook(lambda *_: calls.append("norm"))
    checkpoint_activations([block], ActivationCheckpointingConfig(mode="selective"))
    block(torch.randn(1, 8, 32, requires_grad=True)).sum().backward()
    assert len(calls) == 2
