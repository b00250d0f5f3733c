"""Each optimizer over 20 steps in float32 and float64 against the package that has it."""

import copy

import pytest
import schedulefree
import torch
import torch.optim._muon as torch_muon
from forge_trainer.optim import AdamWConfig, MuonConfig, ScheduleFreeAdamWConfig, trainable
from forge_trainer.optim.averaged import evaluation_weights
from forge_trainer.optim.local_parameters import LocalOptimizer
from torch import nn
from torchao.optim.adam import single_param_adam

STEPS = 20
SHAPES = {"wide": (8, 16), "tall": (16, 8), "square": (8, 8), "row": (1, 8), "column": (8, 1), "gain": (8,)}
TOLERANCE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-6},  # twenty steps, of operations in another order
    torch.float64: {"rtol": 1e-11, "atol": 1e-13},
}


class Model(nn.Module):
    """Matrices of several shapes, and a norm unless it is left out."""

    def __init__(self, dtype: torch.dtype, gain: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            if gain or name != "gain":
                setattr(self, name, nn.Parameter(value))

    def parameter_roles(self):
        return {name: "norm" if name == "gain" else "matrix" for name, _ in self.named_parameters()}


def rate(step: int) -> float:
    return 0.01 * (1 - step / 40)


def take(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()


def of_torch(model: Model, weight_decay: float = 0.1) -> list[dict]:
    """Groups in which norms do not decay."""
    matrices = [p for name, p in model.named_parameters() if name != "gain"]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": [model.gain], "weight_decay": 0.0},
    ]


def compare(model: nn.Module, reference: nn.Module, dtype: torch.dtype) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            ours, theirs, msg=lambda text, name=name: f"{name}: {text}", **TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_adamw_equals_torch_without_fusion(dtype):
    model = Model(dtype)
    config = AdamWConfig(lr=0.01)
    fused, ruled, reference = model, copy.deepcopy(model), copy.deepcopy(model)
    take(fused, config.build(trainable([fused])))
    take(ruled, LocalOptimizer(config.param_groups(trainable([ruled])), {"AdamW": config._step}))
    take(reference, torch.optim.AdamW(of_torch(reference), betas=(0.9, 0.95), foreach=False))
    compare(fused, reference, dtype)
    compare(ruled, reference, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_schedule_free_equals_schedulefree(dtype):
    model = Model(dtype)
    reference = copy.deepcopy(model)
    config = ScheduleFreeAdamWConfig(lr=0.01, weight_decay=0.1)
    optimizer = config.build(trainable([model]))
    theirs = schedulefree.AdamWScheduleFree(of_torch(reference), betas=(0.9, 0.95), foreach=False)
    theirs.train()
    take(model, optimizer)
    take(reference, theirs)
    compare(model, reference, dtype)
    theirs.eval()
    with evaluation_weights(config, optimizer):
        compare(model, reference, dtype)


class Wide:
    """The module `torch`, in which `bfloat16` is another number format."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.bfloat16 = dtype

    def __getattr__(self, name: str):
        return getattr(torch, name)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("scale", "theirs"),
    [
        ("original", "original"),
        ("match-rms-adamw", "match_rms_adamw"),
        ("spectral", "spectral_unclamped"),
    ],
)
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
def test_muon_equals_torch_where_it_computes_as_wide(dtype, scale, theirs, nesterov, monkeypatch):
    """torch always computes in bfloat16; here its own code is given the format of the weights instead."""
    monkeypatch.setattr(torch_muon, "torch", Wide(dtype))
    model = Model(dtype, gain=False)
    reference = copy.deepcopy(model)
    config = MuonConfig(lr=0.01, scale=scale, nesterov=nesterov)
    take(model, config.build(trainable([model])))
    published = torch.optim.Muon(
        reference.parameters(), weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=theirs
    )
    take(reference, published)
    compare(model, reference, dtype)


def test_bfloat16_moments_equal_those_of_torchao():
    """The step of torchao, which keeps moments in what it is given; weights are float32."""
    model = Model(torch.float32)
    reference = copy.deepcopy(model)
    begun = copy.deepcopy(model)
    take(model, AdamWConfig(lr=0.01, moments="bfloat16").build(trainable([model])))
    moments = {n: [torch.zeros_like(p, dtype=torch.bfloat16)] * 2 for n, p in reference.named_parameters()}
    moments = {name: [moment.clone() for moment in both] for name, both in moments.items()}
    with torch.no_grad():
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            for name, p in reference.named_parameters():
                gradient = torch.randn(p.shape, generator=generator, dtype=torch.float64).float()
                decay = 0.0 if name == "gain" else 0.1
                counted, lr = torch.tensor(step + 1.0), torch.tensor(rate(step))
                single_param_adam(
                    p, gradient, counted, *moments[name], None, lr, 0.9, 0.95, decay, 1e-8, True, False
                )
    for (name, ours), theirs, first in zip(
        model.named_parameters(), reference.parameters(), begun.parameters(), strict=True
    ):
        # a moment that lies between two bfloat16 numbers may fall to either side
        assert (ours - theirs).norm() < 1e-3 * (theirs - first).norm(), name
