"""Optimizers against published ones or their formulas in float64, through bad steps and restarts."""

import copy
from pathlib import Path

import pytest
import schedulefree
import torch
from forge_ckpt import manifest
from forge_ckpt.state import TrainState
from forge_ckpt.store import Store
from forge_parallel.mesh import Mesh
from forge_resilience.finite import step_if_finite
from forge_trainer.optim import (
    AdamWConfig,
    GroupRule,
    LionConfig,
    OptimizerConfig,
    ScheduleFreeAdamWConfig,
    optimizers,
    trainable,
)
from forge_trainer.optim.averaged import evaluation_weights
from forge_trainer.steps.update import Update
from torch import nn

CPU = Mesh(torch.device("cpu"))
OF: dict[str, OptimizerConfig] = {
    "adamw": AdamWConfig(lr=0.01),
    "lion": LionConfig(lr=0.01),
    "schedule-free-adamw": ScheduleFreeAdamWConfig(lr=0.01),
}


class Model(nn.Module):
    """Matrices of three shapes, one of one row and one of one column among them, and what is no matrix."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {
            "wide": (4, 6),
            "tall": (6, 4),
            "row": (1, 6),
            "column": (6, 1),
            "gain": (6,),
            "embed": (5, 6),
        }
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            setattr(self, name, nn.Parameter(value.to(dtype)))

    def parameter_roles(self):
        return {
            name: {"gain": "norm", "embed": "embedding"}.get(name, "matrix")
            for name, _ in self.named_parameters()
        }


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(
            parameter.dtype
        )


def take(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, peak: float = 0.01) -> None:
    for step in steps:
        give_gradients(model, step)
        for group in optimizer.param_groups:
            group["lr"] = group.get("initial_lr", peak) * (1 - step / 40)
        optimizer.step()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def compare(model: nn.Module, reference: nn.Module, **tolerance) -> None:
    tolerance = {"rtol": 1e-12, "atol": 1e-13} | tolerance
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    gain = {id(model.gain)}
    return [
        {"params": [p for p in model.parameters() if id(p) not in gain], "weight_decay": weight_decay},
        {"params": [model.gain], "weight_decay": 0.0},
    ]


def test_every_optimizer_is_tested():
    assert OF.keys() == set(optimizers) - {"sign-sgd"}


def test_adamw_equals_torch():
    model = Model()
    reference = copy.deepcopy(model)
    take(model, AdamWConfig(lr=0.01).build(trainable([model])), range(20))
    take(
        reference,
        torch.optim.AdamW(decay_groups(reference, 0.1), betas=(0.9, 0.95), foreach=False),
        range(20),
    )
    compare(model, reference)


def test_lion_equals_its_formulas():
    model = Model()
    reference = copy.deepcopy(model)
    config = LionConfig(lr=0.01, weight_decay=0.3)
    take(model, config.build(trainable([model])), range(20))
    moments = {name: torch.zeros_like(p) for name, p in reference.named_parameters()}
    with torch.no_grad():
        for step in range(20):
            give_gradients(reference, step)
            lr = 0.01 * (1 - step / 40)
            for name, p in reference.named_parameters():
                m, decay = moments[name], 0.0 if name == "gain" else 0.3
                p -= lr * ((0.9 * m + 0.1 * p.grad).sign() + decay * p)
                m.mul_(0.99).add_(p.grad, alpha=0.01)
    compare(model, reference)


def test_schedule_free_equals_the_published_one_while_training_and_in_evaluation():
    model = Model()
    reference = copy.deepcopy(model)
    config = ScheduleFreeAdamWConfig(lr=0.01, weight_decay=0.2)
    optimizer = config.build(trainable([model]))
    theirs = schedulefree.AdamWScheduleFree(decay_groups(reference, 0.2), betas=(0.9, 0.95), foreach=False)
    theirs.train()
    take(model, optimizer, range(20))
    take(reference, theirs, range(20))
    compare(model, reference)
    trained = weights(model)
    theirs.eval()
    with evaluation_weights(config, optimizer):
        compare(model, reference)
        assert not torch.equal(model.wide, trained["wide"])
    assert all(torch.equal(value, trained[name]) for name, value in weights(model).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OF)
def test_step_that_is_not_finite_changes_no_bit(name, dtype):
    model = Model(dtype)
    optimizer = OF[name].build(trainable([model]), CPU)
    take(model, optimizer, range(3))
    before = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    give_gradients(model, 3)
    model.wide.grad[0, 0] = float("nan")
    model.tall.grad[0, 0] = float("inf")
    step_if_finite(optimizer, torch.tensor(False))
    assert_bits(before[0], weights(model))
    for old, new in zip(before[1].values(), optimizer.state_dict()["state"].values(), strict=True):
        assert_bits(old, new)
    give_gradients(model, 3)
    step_if_finite(optimizer, torch.tensor(True))
    reference = Model(dtype)
    other = OF[name].build(trainable([reference]), CPU)
    take(reference, other, range(3))
    give_gradients(reference, 3)
    other.step()
    assert_bits(weights(reference), weights(model))


def assert_bits(a: dict, b: dict) -> None:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    assert a.keys() == b.keys()
    for key, value in a.items():
        kind = kinds[value.element_size()]
        assert torch.equal(value.view(kind), b[key].view(kind)), key


@pytest.mark.parametrize("name", OF)
def test_run_goes_on_from_every_step_bit_for_bit(name, tmp_path):
    rules = (GroupRule(match=("tall",), freeze_until=2), GroupRule(match=("row",), lr=0.5))
    config = OF[name].__class__(
        **{f: getattr(OF[name], f) for f in OF[name].__struct_fields__} | {"groups": rules}
    )

    def start():
        model = Model(torch.float32)
        optimizer = config.build(trainable([model]), CPU)
        update = Update([model], optimizer, lambda step: 1 - step / 10, 1.0, CPU)
        return model, TrainState([model], optimizer), update

    def step(model, update, index):
        give_gradients(model, index)
        if index == 3:
            model.wide.grad[0, 0] = float("nan")
        update(index, torch.tensor(1.0))

    model, state, update = start()
    store = Store(tmp_path, keep=99)
    for index in range(6):
        store.save(index, state.capture())
        step(model, update, index)
    final = state.capture()
    for begin in range(6):
        model, state, update = start()
        opened = manifest.read(store.folder(begin))
        store.load(begin, state.targets(opened.tensors))
        state.restore(opened.values)
        for index in range(begin, 6):
            step(model, update, index)
        again = state.capture()
        assert_bits(final.tensors, again.tensors)
        assert final.values == again.values


def test_optimizer_of_the_docs_page_works():
    page = (Path(__file__).parents[3] / "docs" / "optimizers.md").read_text()
    exec(page.split("```python\n")[1].partition("```")[0], made := {})
    model = Model()
    before = weights(model)
    take(model, made["SignSGDConfig"](lr=0.01).build(trainable([model])), range(1))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, before[name] - 0.01 * p.grad.sign())
