"""What a model may do between backward and optimizer, and what a parameter's role decides."""

import pytest
import torch
from forge_config import ConfigError
from forge_parallel.mesh import Mesh
from forge_trainer.optim import AdamWConfig, trainable
from forge_trainer.steps.update import Update
from torch import nn


class Router(nn.Module):
    """Counts, and moves a bias by the sign of the count before each optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2, 3)
        self.norm = nn.LayerNorm(2)
        self.register_buffer("bias", torch.zeros(3))
        self.register_buffer("count", torch.tensor([1.0, -2.0, 0.0]))

    def before_optimizer_step(self, sum_):
        self.bias += sum_(self.count.clone()).sign()

    def parameter_roles(self):
        return {"gate.weight": "matrix", "gate.bias": "bias", "norm.weight": "norm", "norm.bias": "norm"}


def update(model) -> Update:
    optimizer = AdamWConfig(lr=1e-2).build(trainable([model]))
    return Update([model], optimizer, lambda step: 1.0, 1.0, Mesh(torch.device("cpu")))


@pytest.mark.parametrize("poison", [0.0, float("nan")])
def test_update_lets_the_model_act_once_before_the_optimizer(poison):
    model = Router()
    step = update(model)
    held = step.begin(1)
    before = [p.clone() for p in model.parameters()]
    loss = model.gate(model.norm(torch.ones(1, 2) + torch.randn(1, 2))).sum() * (1 + poison)
    loss.backward()
    finite = step(0, loss.detach(), held).finite
    assert bool(finite) == (poison == 0)
    assert model.bias.tolist() == ([1.0, -1.0, 0.0] if finite else [0.0, 0.0, 0.0])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)) != bool(finite)
    assert all(p.grad is None for p in model.parameters())


def test_weight_decay_follows_the_role_and_not_the_shape():
    model = Router()
    groups = AdamWConfig(weight_decay=0.1).build(trainable([model])).param_groups
    decayed = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert {n: decayed[id(p)] for n, p in model.named_parameters()} == {
        "gate.weight": 0.1, "gate.bias": 0.0, "norm.weight": 0.0, "norm.bias": 0.0,
    }  # fmt: skip


def test_frozen_parameters_are_in_no_group():
    model = Router()
    model.gate.requires_grad_(False)
    assert [p.name for p in trainable([model])] == ["norm.weight", "norm.bias"]


def test_parameter_without_a_role_is_an_error_that_names_it():
    model = Router()
    model.extra = nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigError, match="extra"):
        trainable([model])
