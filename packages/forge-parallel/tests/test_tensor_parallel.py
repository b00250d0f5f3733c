"""Roles of a plan on plain modules: against one process, and what is refused."""

import copy

import pytest
import torch
import torch.distributed as dist
from forge_parallel import Env, MeshConfig, ParallelConfig, ParallelError, Plan, build_mesh, parallelize
from forge_parallel.config import TensorParallelConfig
from forge_parallel.testing import run_ranks
from torch import nn

ROLES = {
    "embed": "embed",
    "layers.*": "gather",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "norm": "norm",
    "head": "head",
}


class Own(nn.Module):
    """A model that knows nothing of Forge."""

    def __init__(self, vocab: int = 12, dim: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, hidden) for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(hidden=x)
        return self.head(self.norm(x))


class Layer(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, hidden):
        return self.down(self.up(hidden).relu())


def difference(sequence: bool) -> list[float]:
    """How far logits and gradients are from those of the model as it was."""
    torch.manual_seed(0)
    model = Own().double()
    reference = copy.deepcopy(model)
    mesh = build_mesh(MeshConfig(tp=dist.get_world_size()), Env.detect())
    config = ParallelConfig(tensor_parallel=TensorParallelConfig(sequence=sequence))
    parallelize(model, mesh, Plan.of({"blocks": "layers.*", "tensor": ROLES}), config)
    tokens = torch.randint(12, (3, 4), generator=torch.Generator().manual_seed(1))
    weight = torch.randn(3, 4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ours, theirs = model(tokens), reference(tokens)
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    named = dict(reference.named_parameters())
    gradients = {name: p.grad.full_tensor() - named[name].grad for name, p in model.named_parameters()}
    assert gradients.keys() == named.keys(), "names of parameters do not change"
    return [(ours - theirs).abs().max().item(), max(g.abs().max().item() for g in gradients.values())]


@pytest.mark.dist
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "whole-sequence"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_own_module_equals_one_process(world_size, sequence):
    for errors in run_ranks(difference, world_size, sequence):
        assert max(errors) < 1e-12


def refusals() -> dict[str, str]:
    """What is said of plans and models that do not fit two ranks."""
    mesh = build_mesh(MeshConfig(tp=2), Env.detect())
    padded = Own()
    padded.embed = nn.Embedding(12, 6, padding_idx=0)
    cases = {
        "odd width": (Own(hidden=7), {"tensor": ROLES}),
        "odd vocabulary": (Own(vocab=11), {"tensor": ROLES}),
        "odd heads": (Own(), {"tensor": ROLES, "divisible": {"num_heads": 3}}),
        "no role": (Own(), {"tensor": {k: v for k, v in ROLES.items() if k != "norm"}}),
        "wrong kind": (Own(), {"tensor": ROLES | {"norm": "colwise"}}),
        "padding": (padded, {"tensor": ROLES}),
        "two roles": (Own(), {"tensor": ROLES | {"nor*": "head_norm"}}),
    }
    said = {}
    for name, (model, plan) in cases.items():
        try:
            parallelize(model, mesh, Plan.of({"blocks": "layers.*"} | plan))
        except ParallelError as error:
            said[name] = str(error)
    model = Own()
    parallelize(model, mesh, Plan.of({"blocks": "layers.*", "tensor": ROLES}))
    try:
        model(torch.zeros(1, 3, dtype=torch.int64))
    except ParallelError as error:
        said["odd sequence"] = str(error)
    return said


@pytest.mark.dist
def test_what_cannot_be_cut_is_refused_with_its_reason():
    for said in run_ranks(refusals, 2):
        assert "layers.0.up.weight (7, 6)" in said["odd width"]
        assert "embed.weight (11, 6)" in said["odd vocabulary"]
        assert "num_heads = 3" in said["odd heads"]
        assert "norm.weight, norm.bias" in said["no role"]
        assert "norm is a LayerNorm" in said["wrong kind"]
        assert "padding_idx" in said["padding"]
        assert "'nor*' of the plan gives norm a second role" in said["two roles"]
        assert "sequence of 3 tokens" in said["odd sequence"]
