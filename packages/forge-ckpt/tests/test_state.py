import copy

import pytest
import torch
from forge_ckpt import CheckpointError, Store, TrainState, Weights, write_weights
from forge_ckpt.cli import main
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.outer = nn.Linear(6, 6, bias=False)
        self.outer.weight = self.inner.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.outer(self.norm(self.inner(x)))


OPTIMIZERS = {
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


def train(model, optimizer, first, last):
    for step in range(first, last):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("middle", [1, 3, 5])
def test_train_state_resumes_bit_identical_at_every_midpoint(tmp_path, kind, middle):
    torch.manual_seed(0)
    model = Tied()
    whole, cut = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = OPTIMIZERS[kind](whole.parameters())
    train(whole, optimizer, 0, 6)

    first = OPTIMIZERS[kind](cut.parameters())
    train(cut, first, 0, middle)
    Store(tmp_path).save(middle, TrainState(cut, first).tensors(), {})

    torch.manual_seed(9)
    fresh = Tied()
    # another order of parameters: state is found by name
    groups = [{"params": [p]} for p in reversed(list(fresh.parameters()))]
    second = OPTIMIZERS[kind](groups)
    state = TrainState(fresh, second)
    assert Store(tmp_path).resume(state.targets) is not None
    train(fresh, second, middle, 6)
    expected = TrainState(whole, optimizer).tensors()
    assert state.tensors().keys() == expected.keys()
    for key, value in state.tensors().items():
        assert torch.equal(value, expected[key]), key


def test_train_state_saves_shared_parameters_once_and_no_scratch():
    keys = TrainState(Tied(), torch.optim.SGD([torch.zeros(1)], lr=1)).tensors().keys()
    assert "model.inner.weight" in keys and "model.outer.weight" not in keys
    assert "model.norm.running_mean" in keys and "model.scratch" not in keys


def test_train_state_refuses_optimizer_state_of_a_parameter_there_is_not(tmp_path):
    model = Tied()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 0, 1)
    Store(tmp_path).save(1, TrainState(model, optimizer).tensors(), {})
    other = nn.Linear(6, 6)
    state = TrainState(other, OPTIMIZERS["adamw"](other.parameters()))
    with pytest.raises(CheckpointError, match="no parameter"):
        Store(tmp_path).resume(state.targets)


@pytest.mark.parametrize("shard_bytes", [10**9, 300])
def test_weights_come_back_in_one_file_or_several(tmp_path, shard_bytes):
    tensors = {f"w{i}": torch.randn(8, 8) for i in range(4)} | {"half": torch.randn(3).bfloat16()}
    write_weights(tmp_path / "out", tensors, {"model_type": "x"}, shard_bytes)
    weights = Weights(tmp_path / "out")
    assert set(weights) == set(tensors)
    assert all(torch.equal(weights[key], value) for key, value in tensors.items())
    assert weights.config() == {"model_type": "x"}
    with pytest.raises(CheckpointError, match="exists"):
        write_weights(tmp_path / "out", tensors, {})


def test_weights_with_a_lost_shard_are_refused(tmp_path):
    write_weights(tmp_path / "out", {f"w{i}": torch.randn(8, 8) for i in range(3)}, {}, 300)
    next((tmp_path / "out").glob("model-00002*")).unlink()
    with pytest.raises(CheckpointError, match="model-00002"):
        Weights(tmp_path / "out")


def test_cli_lists_verifies_and_prunes(tmp_path, capsys):
    store = Store(tmp_path, keep=9)
    for step in (1, 2, 3):
        store.save(step, {"w": torch.ones(4)}, {})
    assert main(["ls", str(tmp_path)]) == 0
    assert main(["show", str(tmp_path)]) == 0
    assert "w  float32 [4]" in capsys.readouterr().out
    path = store.folder(2) / "rank-00000.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert main(["verify", str(tmp_path)]) == 1
    assert "damaged" in capsys.readouterr().out
    assert main(["prune", str(tmp_path), "--keep", "1"]) == 0
    assert store.steps() == [3]
