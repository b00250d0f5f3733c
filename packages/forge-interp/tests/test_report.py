import pytest
import torch
import torch.nn.functional as F
from forge_interp import InterpError, capture, resolve
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.ran = 0

    def forward(self, x, picky=False):
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x).bfloat16().float()
        if picky and x.sum() > 0:
            return x
        heads = x.unflatten(-1, (2, 2)).transpose(0, 1)[None]
        return F.scaled_dot_product_attention(heads, heads, heads)


def test_resolve_lists_what_patterns_name():
    report = resolve(Model(), ["layers.*:in", "norm"])
    assert report.sites == {"layers.*:in": ["layers.0:in", "layers.1:in"], "norm": ["norm:out"]}
    assert report.shapes == {}
    assert "layers.*:in  (2 sites)\n  layers.0:in\n  layers.1:in" in str(report)


def test_resolve_gives_the_shapes_of_a_capture_and_leaves_the_model_alone():
    model, x = Model(), torch.randn(3, 4)
    sites = ["layers.*", ":attn.pattern", ":attn.entropy", ":out"]
    report = resolve(model, sites, x)
    assert model.norm.num_batches_tracked == 0
    assert not model.norm.running_mean.any()
    with capture(model, sites) as acts:
        model(x)
    assert report.shapes == {key: (tuple(value.shape), value.dtype) for key, value in acts.items()}
    assert report.problem is None
    assert ":attn.pattern  [1, 2, 3, 3] float32" in str(report)


def test_resolve_shows_every_call_of_a_shared_module():
    layer = nn.Linear(4, 4)
    report = resolve(nn.Sequential(layer, layer), "0", torch.randn(2, 4))
    assert list(report.shapes) == ["0:out", "0:out#1"]


def test_resolve_works_on_models_without_weights():
    with torch.device("meta"):
        model = nn.Linear(1000, 10**6)
    assert resolve(model, "", torch.randn(2, 1000, device="meta")).shapes[":out"][0] == (2, 10**6)


def test_resolve_says_why_there_are_no_shapes_when_the_path_depends_on_values():
    report = resolve(Model(), "layers.*", torch.randn(3, 4), picky=True)
    assert "DataDependent" in report.problem
    assert report.problem in str(report)
    assert list(report.shapes) == ["layers.0:out", "layers.1:out"]


def test_resolve_leaves_nothing_fake_behind():
    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))
            self.table = None

        def forward(self, x):
            self.steps = self.steps + 1
            if self.table is None:
                self.table = torch.arange(x.shape[-1]).to(x)
            return x + self.table * self.steps

    model = Caching()
    resolve(model, "", torch.zeros(2, 3))
    assert model.steps == 0
    assert torch.equal(model(torch.zeros(3)), torch.arange(3.0))


def test_resolve_raises_when_a_pattern_names_nothing():
    with pytest.raises(InterpError, match=r"did you mean layers\.\*"):
        resolve(Model(), "layer.*")
