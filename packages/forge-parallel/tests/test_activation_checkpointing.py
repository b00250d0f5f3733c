import torch
from forge_parallel.activation_checkpointing import checkpoint_activations
from forge_parallel.compile import compile_blocks
from forge_parallel.config import CompileConfig
from torch import nn


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
    checkpoint_activations([block])
    assert torch.equal(gradient(block), plain)
    assert block.calls - once == 2 * once
    assert list(block.state_dict()) == names


def test_compile_blocks_compiles_equal_blocks_once():
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounter()
    blocks = [nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(12)]
    x = torch.ones(2, 3)
    wanted = [block(x) for block in blocks]
    checkpoint_activations(blocks)
    compile_blocks(blocks, CompileConfig(enabled=True, backend=counter))  # type: ignore[arg-type]
    assert all(torch.equal(block(x), w) for block, w in zip(blocks, wanted, strict=True))
    assert counter.frame_count == 1
