"""What a model may do between backward and optimizer, and what a parameter's role decides."""

import pytest
import torch
from forge_config import ConfigError
from forge_model.config import (
    DecoderConfig,
    GroupedQueryConfig,
    MoEConfig,
    SigmoidRouterConfig,
    SoftmaxRouterConfig,
)
from forge_parallel.mesh import Mesh
from forge_trainer.config.job import load_job
from forge_trainer.optim import AdamWConfig, trainable
from forge_trainer.optim.averaged import evaluation_weights
from forge_trainer.steps.update import Update
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


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


PLAIN = AdamWConfig(lr=1e-2)


def update(model, config=PLAIN) -> Update:
    optimizer = config.build(trainable([model]))
    return Update([model], optimizer, lambda step: 1.0, 1.0, Mesh(torch.device("cpu")), config.ema_decay)


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


def test_moving_average_is_that_of_torch_and_passes_over_steps_that_are_not_finite():
    torch.manual_seed(0)
    model = Router()
    config = AdamWConfig(lr=1e-2, ema_decay=0.9)
    step = update(model, config)
    reference = None
    for index in range(20):
        x = torch.ones(1, 2) + torch.randn(1, 2)
        loss = model.gate(model.norm(x)).sum() * (float("nan") if index == 7 else 1.0)
        loss.backward()
        finite = bool(step(index, loss.detach()).finite)
        assert finite == (index != 7)
        if reference is None:
            reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        if finite:
            reference.update_parameters(model)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    with evaluation_weights(config, step.optimizer):
        for name, value in reference.module.named_parameters():
            torch.testing.assert_close(model.get_parameter(name), value, rtol=1e-6, atol=1e-7)
    for name, value in before.items():
        assert torch.equal(model.get_parameter(name), value)
        assert not torch.equal(reference.module.get_parameter(name), value)


def test_schedule_free_has_no_second_average():
    flags = ["--optimizer.type=schedule-free-adamw", "--optimizer.ema_decay=0.9"]
    with pytest.raises(ConfigError, match="averages the weights itself"):
        load_job("configs/runs/debug.toml", flags)


def test_schedule_free_refuses_a_schedule_that_decays():
    flags = ["--optimizer.type=schedule-free-adamw"]
    with pytest.raises(
        ConfigError, match=r'schedule\.type = "cosine" decays; set schedule.type = "constant"'
    ):
        load_job("configs/runs/debug.toml", flags)
    job = load_job(
        "configs/runs/debug.toml", [*flags, "--schedule.type=constant", "--schedule.warmup_steps=20"]
    )
    assert job.unused[0].startswith("optimizer.lr = 0.003 (configs/runs/debug.toml:")


def test_more_steps_than_can_be_counted_are_refused_at_once():
    with pytest.raises(ConfigError, match=r"train\.steps: given 9+; expected integer >= 1, <= "):
        load_job("configs/runs/debug.toml", ["--train.steps=99999999999999999999999"])


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


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("linear_warmup", [0.1, 0.2, 0.3, 0.4, 0.4]),
        ("cosine", [0.4, 0.2 + 0.1 * 2**0.5, 0.2, 0.2 - 0.1 * 2**0.5, 0.0]),
    ],
)
def test_bias_of_a_router_moves_by_the_rate_of_its_step(schedule, rates):
    router = SigmoidRouterConfig(bias_rate=0.4, bias_schedule=schedule, bias_schedule_steps=4)
    model = experts(router=router)
    step, bias = update(model), torch.zeros(EXPERTS)
    for index, rate in enumerate(rates):
        held = step.begin(20, index)
        loss, counts, _ = passed(model)
        step(index, loss, held)
        bias += rate * (counts.mean() - counts).sign().float()
        torch.testing.assert_close(model.layers["0"].ffn.router.selection_bias, bias)


def test_gradients_of_experts_are_scaled_by_the_mean_load_over_their_own_before_clipping():
    model = experts(scale_gradients=True, router=SoftmaxRouterConfig(bias=True)).double()
    step = update(model)
    seen = {}
    step.optimizer.register_step_pre_hook(
        lambda *_: seen.update({name: p.grad.clone() for name, p in model.named_parameters()})
    )
    held = step.begin(20, 0)
    loss, counts, gradients = passed(model)
    assert counts.min() == 0 < counts.max() > counts.mean(), "loads differ, and one expert has none"
    norm = step(0, loss, held).grad_norm
    for name, gradient in gradients.items():
        if ".experts." in name:
            for expert, count in enumerate(counts):
                gradient[expert] *= 0 if count == 0 else counts.mean() / count
    whole = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    torch.testing.assert_close(norm.double(), whole, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(seen[name], gradient * min(1, 1 / whole), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("keys", [{"bias_schedule": "cosine"}, {"bias_schedule_steps": 4}])
def test_schedule_of_the_bias_without_its_steps_is_refused(keys):
    with pytest.raises(ValueError, match="needs its number of steps"):
        SigmoidRouterConfig(**keys)


EXPERTS = 5


def experts(**keys) -> nn.Module:
    """A decoder of one layer of experts; where the router has a bias, nobody chooses the last of them."""
    ffn = MoEConfig(num_experts=EXPERTS, top_k=2, dim=8, **keys)
    config = DecoderConfig(
        vocab_size=11, dim=16, num_layers=1, attention=GroupedQueryConfig(num_heads=2), ffn=ffn
    )
    model = config.build()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
        for buffer in model.buffers():
            buffer.zero_()
        if (bias := model.layers["0"].ffn.router.bias) is not None:
            bias[-1] = -1e3
    return model


def passed(model):
    """A loss whose gradients are there, the tokens of each expert as its router chose them, the gradients."""
    chosen = []
    handle = model.layers["0"].ffn.router.register_forward_hook(
        lambda _, __, out: chosen.append(out.routing.experts)
    )
    loss = model(torch.arange(20).view(2, 10) % 11).square().mean()
    loss.backward()
    handle.remove()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return loss.detach(), chosen[0].bincount(minlength=EXPERTS).double(), gradients
