"""Optimizers against published ones or their formulas in float64, through bad steps and restarts."""

import copy
from pathlib import Path

import pytest
import schedulefree
import torch
from forge_ckpt import manifest
from forge_ckpt.state import TrainState
from forge_ckpt.store import Store
from forge_config import MayChange, changeable
from forge_parallel.capabilities import without_dynamo
from forge_parallel.mesh import Mesh
from forge_resilience.finite import step_if_finite
from forge_trainer.cli import main
from forge_trainer.optim import (
    AdamWConfig,
    GroupRule,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    ScheduleFreeAdamWConfig,
    gather_matrices,
    optimizers,
    trainable,
)
from forge_trainer.optim.averaged import evaluation_weights
from forge_trainer.optim.newton_schulz import cost
from forge_trainer.steps.update import Update
from torch import nn

CPU = Mesh(torch.device("cpu"))
OF: dict[str, OptimizerConfig] = {
    "adamw": AdamWConfig(lr=0.01),
    "adamw-narrow": AdamWConfig(lr=0.01, moments="bfloat16", rounding="stochastic"),
    "lion": LionConfig(lr=0.01),
    "muon": MuonConfig(lr=0.01, scale="original"),
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
        with without_dynamo():
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
    assert OF.keys() - {"adamw-narrow"} == set(optimizers) - {"sign-sgd"}


@pytest.mark.parametrize("config", [LionConfig, ScheduleFreeAdamWConfig])
def test_compiling_may_change_while_a_run_goes_on(config):
    assert changeable(config())["compile"] is MayChange.FREELY


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


@pytest.mark.parametrize("name", OF)
def test_parameters_that_lie_in_memory_in_another_order_are_taken_alike(name):
    """torch's fused kernel for CPUs reads memory in order: a view would get the steps of its neighbours."""
    plain, views = Model(), Model()
    views.wide = nn.Parameter(plain.wide.detach().t().contiguous().t())
    views.tall = nn.Parameter(torch.cat([plain.tall.detach()] * 2, 1)[:, :4])
    views.embed = nn.Parameter(plain.embed.detach().t().contiguous().t())
    for model in (plain, views):
        optimizer = OF[name].build(trainable([model]), CPU)
        for step in range(3):
            give_gradients(model, step)
            optimizer.step()
    for ours, theirs in zip(views.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


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
    take(model, made["SignSGDConfig"](lr=0.01, weight_decay=0.2).build(trainable([model])), range(1))
    for name, p in model.named_parameters():
        decay = 0.2 if p.ndim > 1 else 0.0
        torch.testing.assert_close(p, before[name] * (1 - 0.01 * decay) - 0.01 * p.grad.sign())


class Matrices(nn.Module):
    """Matrices of many shapes, stacked ones among them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        shapes = [(8, 16), (16, 8), (8, 16), (8, 8), (1, 8), (8, 1), (3, 8, 16)]
        for index, shape in enumerate(shapes):
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            setattr(self, f"m{index}", nn.Parameter(value.to(dtype)))

    def parameter_roles(self):
        return {name: "expert" if p.ndim == 3 else "matrix" for name, p in self.named_parameters()}


def naive_muon(model: nn.Module, factor, steps: int) -> None:
    """The formulas, matrix after matrix."""
    momenta = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(steps):
        give_gradients(model, step)
        lr = 0.01 * (1 - step / 40)
        for name, p in model.named_parameters():
            momenta[name] = 0.95 * momenta[name] + 0.05 * p.grad
            ahead = 0.05 * p.grad + 0.95 * momenta[name]
            for matrix, value in zip(
                ahead.view(-1, *p.shape[-2:]), p.data.view(-1, *p.shape[-2:]), strict=True
            ):
                x = matrix / matrix.norm()
                for _ in range(5):
                    x = 3.4445 * x - 4.775 * x @ x.mT @ x + 2.0315 * x @ x.mT @ x @ x.mT @ x
                value.mul_(1 - lr * 0.1).sub_(x * lr * factor(*x.shape))


FACTORS = {
    "original": lambda a, b: max(1, a / b) ** 0.5,
    "match-rms-adamw": lambda a, b: 0.2 * max(a, b) ** 0.5,
    "spectral": lambda a, b: (a / b) ** 0.5,
}


@pytest.mark.parametrize("scale", FACTORS)
def test_muon_equals_its_formulas(scale, monkeypatch):
    monkeypatch.setattr(gather_matrices, "BUCKET_ELEMENTS", 200)
    model = Matrices(torch.float64)
    reference = copy.deepcopy(model)
    take(model, MuonConfig(lr=0.01, scale=scale).build(trainable([model])), range(20))
    with torch.no_grad():
        naive_muon(reference, FACTORS[scale], 20)
    compare(model, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("scale", "theirs"), [("original", "original"), ("match-rms-adamw", "match_rms_adamw")]
)
def test_muon_equals_torch_but_for_the_rounding_of_bfloat16(scale, theirs):
    model = Matrices(torch.float32)
    del model.m6  # torch knows no stacked matrices
    reference = copy.deepcopy(model)
    begun = weights(model)
    config = MuonConfig(lr=0.01, scale=scale, compute="bfloat16", weight_decay=0.0)
    take(model, config.build(trainable([model])), range(5))
    take(
        reference,
        torch.optim.Muon(reference.parameters(), weight_decay=0.0, adjust_lr_fn=scale.replace("-", "_")),
        range(5),
    )
    for (name, p), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        # products of bfloat16 are summed in another order in a batch: some 2^-8 of each update
        assert (p - other).norm() < 0.02 * (p - begun[name]).norm(), name


def test_muon_leaves_what_is_no_matrix_to_adamw_with_its_own_rate():
    model = Model()
    reference = copy.deepcopy(model)
    config = MuonConfig(lr=0.05, adamw_lr=0.01, scale="spectral", roles=("matrix",))
    take(model, config.build(trainable([model])), range(20))
    take(reference, AdamWConfig(lr=0.01).build(trainable([reference])), range(20))
    for name in ("gain", "embed"):
        torch.testing.assert_close(
            model.get_parameter(name), reference.get_parameter(name), rtol=1e-12, atol=1e-13
        )


def test_matrix_without_gradient_keeps_its_direction_at_zero():
    model = Matrices(torch.float64)
    optimizer = MuonConfig(lr=0.01, scale="original", weight_decay=0.0).build(trainable([model]))
    before = weights(model)
    give_gradients(model, 0)
    model.m0.grad = None
    optimizer.step()
    assert torch.equal(model.m0, before["m0"]) and not torch.equal(model.m1, before["m1"])


def test_owners_share_the_work_of_each_bucket_evenly():
    shapes = [(16, 16)] * 6 + [(8, 16)] * 4
    holdings = [
        [gather_matrices.Holding(gather_matrices.Box((r * n // 4, 0), (n // 4, m)), True) for n, m in shapes]
        for r in range(4)
    ]
    whole = [gather_matrices.Box((0, 0), shape) for shape in shapes]
    matrices = [gather_matrices.Matrix(i, box) for i, box in enumerate(whole)]
    (bucket,) = gather_matrices._buckets(matrices, holdings, 4)
    load = [sum(cost(*m.size) for m in bucket if m.owner == rank) for rank in range(4)]
    assert max(load) <= 1.2 * sum(load) / 4


@pytest.mark.parametrize("roles", [(), ("norm",), ("bias", "norm")])
def test_muon_without_matrices_is_refused(roles):
    with pytest.raises(ValueError, match="name one of matrix, expert"):
        MuonConfig(scale="spectral", roles=roles)


def test_muon_without_a_scale_is_refused(capsys):
    assert main(["plan", "configs/runs/debug.toml", "--optimizer.type=muon"]) == 78
    assert "scale" in capsys.readouterr().err
    assert (
        main(["plan", "configs/runs/debug.toml", "--optimizer.type=muon", "--optimizer.scale=spectral"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    muon = lines.index("    layers.0-3.ffn.w_up.weight")
    assert lines[muon - 6].startswith("  Muon  lr") and "    embed.weight" in lines


def test_moments_in_bfloat16_follow_those_in_float32():
    model = Model(torch.float32)
    reference, begun = copy.deepcopy(model), weights(model)
    take(model, AdamWConfig(lr=0.01, moments="bfloat16").build(trainable([model])), range(20))
    take(reference, AdamWConfig(lr=0.01).build(trainable([reference])), range(20))
    for (name, p), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        # each moment is rounded to 2^-9 of itself in every step
        assert 0 < (p - other).norm() < 0.02 * (other - begun[name]).norm(), name
