"""How optimizers of our own go through memory: in pieces and in place, with the bits of the plain way."""

import copy

import pytest
import torch
from forge_config import ConfigError
from forge_parallel.mesh import Mesh
from forge_resilience.finite import step_if_finite
from forge_trainer.optim import (
    AdamWConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    ScheduleFreeAdamWConfig,
    elementwise,
    local_parameters,
    trainable,
)
from forge_trainer.optim.local_parameters import LocalOptimizer
from msgspec.structs import replace
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


def taken(
    name: str, dtype: torch.dtype, **keys: bool
) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Weights and state after steps of which the first and the fourth are not finite."""
    model = Model(dtype)
    optimizer = replace(OF[name], **keys).build(trainable([model]), CPU)
    for step in range(7):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
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


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}
COMPILED = [
    ("lion", torch.bfloat16, True),
    ("schedule-free-adamw", torch.float32, True),
    pytest.param("lion", torch.float64, False, marks=pytest.mark.slow),
    pytest.param("schedule-free-adamw", torch.float64, False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "dtype", "on_device"), COMPILED, ids=str)
def test_compiled_steps_equal_the_others_and_are_not_compiled_anew(name, dtype, on_device, monkeypatch):
    expected = taken(name, dtype)
    if on_device:  # whether the step is finite is not read
        monkeypatch.setattr(LocalOptimizer, "finite", lambda self: self.found_inf == 0)
    monkeypatch.setattr(local_parameters, "COMPILED_ELEMENTS", 12)
    steps = []
    step_compiled = local_parameters.step_compiled
    monkeypatch.setattr(
        local_parameters, "step_compiled", lambda *given: (steps.append(1), step_compiled(*given))
    )
    torch._dynamo.utils.counters.clear()
    found = taken(name, dtype, compile=True)
    # of the six "wide" and "tall"; "turned" is not in order, the others are small
    assert len(steps) == 2 * 7
    # where it is read, a step that is finite asks no more
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (1 if on_device else 2)
    for mine, theirs in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for mine, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_compiled_step_that_is_not_finite_changes_no_bit(monkeypatch):
    monkeypatch.setattr(local_parameters, "COMPILED_ELEMENTS", 1)
    model = Model(torch.float32)
    optimizer = LionConfig(lr=0.01, compile=True).build(trainable([model]), CPU)
    before = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    monkeypatch.setattr(LocalOptimizer, "finite", lambda self: torch.tensor(False))
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_where_nothing_can_be_compiled_the_error_names_the_key(monkeypatch):
    def fails(*_: object) -> None:
        raise torch._dynamo.exc.BackendCompilerFailed("inductor", OSError("no compiler for C++"), None)

    monkeypatch.setattr(elementwise, "_compiled", lambda formula: fails)
    monkeypatch.setattr(local_parameters, "COMPILED_ELEMENTS", 1)
    with pytest.raises(ConfigError, match=r"optimizer\.compile = true, and .*no compiler for C"):
        taken("lion", torch.float32, compile=True)
