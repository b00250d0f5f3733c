"""Memory that a step takes beside weights, gradients and state, where the device decides if it counts."""

import pytest
import torch
from forge_parallel.grads import clip_, global_norm
from forge_parallel.mesh import Mesh
from forge_resilience.finite import step_if_finite
from forge_trainer.optim import (
    AdamWConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    ScheduleFreeAdamWConfig,
    gather_matrices,
    local_parameters,
    trainable,
)
from forge_trainer.optim.local_parameters import LocalOptimizer
from storages import Storages
from torch import nn

CPU = Mesh(torch.device("cpu"))
LAYERS, WIDTH = 48, 256
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH) + 64 * WIDTH
WINDOW = PARAMETERS // 64
OF: dict[str, tuple[OptimizerConfig, torch.dtype]] = {
    "adamw": (AdamWConfig(), torch.float32),
    "adamw-bfloat16-moments": (AdamWConfig(moments="bfloat16"), torch.float32),
    "adamw-pure": (AdamWConfig(moments="bfloat16"), torch.bfloat16),
    "adamw-stochastic": (AdamWConfig(moments="bfloat16", rounding="stochastic"), torch.bfloat16),
    "lion": (LionConfig(), torch.float32),
    "lion-pure": (LionConfig(), torch.bfloat16),
    "muon": (MuonConfig(scale="original"), torch.float32),
    "muon-pure": (MuonConfig(scale="original", nesterov=False), torch.bfloat16),
    "schedule-free-adamw": (ScheduleFreeAdamWConfig(), torch.float32),
    "schedule-free-pure": (ScheduleFreeAdamWConfig(), torch.bfloat16),
}
MOST_KERNELS = {"adamw-stochastic": 45, "muon-pure": 16}
"""A parameter: stochastic rounding knows no lists of tensors."""


class Deep(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(64, WIDTH).to(dtype))
        for layer in range(LAYERS):
            setattr(self, f"weight{layer}", nn.Parameter(torch.randn(WIDTH, WIDTH).to(dtype)))
            setattr(self, f"gain{layer}", nn.Parameter(torch.randn(WIDTH).to(dtype)))

    def parameter_roles(self):
        return {
            name: "embedding" if name == "embed" else "norm" if "gain" in name else "matrix"
            for name, _ in self.named_parameters()
        }


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The flag stays a tensor, and windows are those of a GPU, small beside this small model."""
    monkeypatch.setattr(LocalOptimizer, "finite", lambda self: self.found_inf == 0)
    monkeypatch.setattr(local_parameters, "window_elements", lambda device: WINDOW)
    monkeypatch.setattr(gather_matrices, "BUCKET_ELEMENTS", WINDOW)


def stepped(name: str, finite: bool = True) -> tuple[Storages, int, torch.optim.Optimizer]:
    config, dtype = OF[name]
    model = Deep(dtype)
    optimizer = config.build(trainable([model]), CPU)
    flag = torch.tensor(finite)
    for seen in (False, True):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        if seen:
            break
        step_if_finite(optimizer, torch.tensor(True))
    storages = Storages()
    with storages:
        storages.known(list(model.parameters()), [p.grad for p in model.parameters()])
        storages.known(optimizer.state_dict()["state"], flag)
        storages.start()
        before = storages.live
        norm = global_norm(model.parameters(), CPU)
        clip_(model.parameters(), 1.0, norm)
        step_if_finite(optimizer, flag)
    return storages, before, optimizer


@pytest.mark.parametrize("name", OF)
def test_step_takes_less_than_two_bytes_a_parameter_beyond_its_state(name, as_on_a_gpu):
    storages, before_step, optimizer = stepped(name)
    state = sum(x.numel() * x.element_size() for s in optimizer.state.values() for x in s.values())
    assert state >= 2 * PARAMETERS, "there is state"
    taken = (storages.peak - before_step) / PARAMETERS
    assert taken < 2, f"{name} took {taken:.1f} bytes a parameter"


@pytest.mark.parametrize("name", [name for name in OF if name != "adamw"])
def test_step_starts_few_kernels_a_parameter_where_a_window_has_many(name, as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(local_parameters, "window_elements", lambda device: PARAMETERS)
    monkeypatch.setattr(gather_matrices, "BUCKET_ELEMENTS", PARAMETERS)
    storages, _, _ = stepped(name)
    assert storages.kernels < 100 + MOST_KERNELS.get(name, 9) * (2 * LAYERS + 1), storages.kernels
