import pytest
from forge_interp import InterpError, resolve
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


def test_resolve_lists_what_patterns_name():
    assert resolve(Model(), ["layers.*:in", "norm"]) == {
        "layers.*:in": ["layers.0:in", "layers.1:in"],
        "norm": ["norm:out"],
    }


def test_resolve_raises_when_a_pattern_names_nothing():
    with pytest.raises(InterpError, match=r"did you mean layers\.\*"):
        resolve(Model(), "layer.*")
