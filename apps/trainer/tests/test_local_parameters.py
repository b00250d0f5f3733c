"""How optimizers of our own go through memory: in pieces and in place, with the bits of the plain way."""

import copy

import pytest
import torch
from forge_parallel.mesh import Mesh
from forge_resilience.finite import step_if_finite
from forge_trainer.optim import (
    AdamWConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    ScheduleFreeAdamWConfig,
    local_parameters,
    trainable,
)
from forge_trainer.optim.local_parameters import LocalOptimizer
from torch import nn

CPU = Mesh(torch.device("cpu"))
OF: dict[str, OptimizerConfig] = {
    "adamw-bfloat16-moments": AdamWConfig(lr=0.01, moments="bfloat16"),
    "adamw-stochastic": AdamWConfig(lr=0.01, moments="bfloat16", rounding="stochastic"),
    "lion": LionConfig(lr=0.01),
    "muon": MuonConfig(lr=0.01, scale="original"),
    "schedule-free-adamw": ScheduleFreeAdamWConfig(lr=0.01),
}
SHAPES = {"wide": (5, 7), "tall": (9, 2), "row": (1, 6), "gain": (6,), "turned": (4, 3), "one": (1,)}


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=generator).to(dtype)
            setattr(self, name, nn.Parameter(value.mT.contiguous().mT if name == "turned" else value))

    def parameter_roles(self):
        return {name: "matrix" if len(shape) == 2 else "norm" for name, shape in SHAPES.items()}


def taken(name: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Weights and state after steps of which the first and the fourth are not finite."""
    model = Model(dtype)
    optimizer = OF[name].build(trainable([model]), CPU)
    for step in range(7):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        step_if_finite(optimizer, torch.tensor(step not in (0, 3)))
    state = optimizer.state_dict()["state"]
    return [p.detach() for p in model.parameters()], copy.deepcopy(list(state.values()))


def compare(found: tuple, expected: tuple) -> None:
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(mine[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OF)
def test_pieces_of_parameters_change_no_bit(name, dtype, monkeypatch):
    whole = taken(name, dtype)
    for elements in (1, 4, 17):
        monkeypatch.setattr(local_parameters, "CHUNK_ELEMENTS", elements)
        compare(taken(name, dtype), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OF)
def test_steps_in_place_have_the_bits_of_those_that_ask_the_device(name, dtype, monkeypatch):
    in_place = taken(name, dtype)

    def asked(self) -> torch.Tensor | None:
        found = getattr(self, "found_inf", None)
        return None if found is None else found == 0

    monkeypatch.setattr(LocalOptimizer, "finite", asked)
    compare(in_place, taken(name, dtype))
