"""Roles of a plan on plain modules: against one process, and what is refused."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forge_parallel import Env, MeshConfig, ParallelConfig, ParallelError, Plan, build_mesh, parallelize
from forge_parallel.config import TensorParallelConfig
from forge_parallel.tensor import is_dtensor
from forge_parallel.tensor_parallel import _overlap
from forge_parallel.testing import run_ranks
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.debug import CommDebugMode

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


def difference(sequence: bool, vocab: int) -> list[float]:
    """How far logits and gradients are from those of the model as it was."""
    torch.manual_seed(0)
    model = Own(vocab).double()
    reference = copy.deepcopy(model)
    mesh = build_mesh(MeshConfig(tp=dist.get_world_size()), Env.detect())
    config = ParallelConfig(tensor_parallel=TensorParallelConfig(sequence=sequence))
    parallelize(model, mesh, Plan.of({"blocks": "layers.*", "tensor": ROLES}), config)
    tokens = torch.randint(vocab, (3, 4), generator=torch.Generator().manual_seed(1))
    weight = torch.randn(3, 4, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ours, theirs = model(tokens), reference(tokens)
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    named = dict(reference.named_parameters())
    gradients = {name: p.grad.full_tensor() - named[name].grad for name, p in model.named_parameters()}
    assert gradients.keys() == named.keys(), "names of parameters do not change"
    return [(ours - theirs).abs().max().item(), max(g.abs().max().item() for g in gradients.values())]


@pytest.mark.dist
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "whole-sequence"])
@pytest.mark.parametrize(("world_size", "vocab"), [(2, 12), (4, 12), (4, 13)])
def test_own_module_equals_one_process(world_size, vocab, sequence):
    for errors in run_ranks(difference, world_size, sequence, vocab):
        assert max(errors) < 1e-12


class Looks(nn.Module):
    """A layer that is given features beside the residual stream, by place and by name."""

    def __init__(self, dim: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.up, self.other, self.down = (
            nn.Linear(dim, hidden, bias=False),
            nn.Linear(dim, hidden, bias=False),
            nn.Linear(hidden, dim),
        )

    def forward(self, hidden, features, scale=None, flag=None):
        assert flag == "kept"
        return self.down((self.up(hidden) + self.other(features).mean(1, keepdim=True)).tanh() * scale)


class Merge(nn.Module):
    def forward(self, x, features, index, factor=1.0):
        index = index[..., None]
        taken = features.gather(1, (index - 1).clamp(min=0).expand(-1, -1, x.shape[-1]))
        return torch.where(index > 0, taken * factor, x)


class Tower(nn.Module):
    """Its child has no role of its own, and it has a parameter itself."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(dim))
        self.inner = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim))

    def forward(self, x):
        return self.inner(x + self.shift)


class Sees(nn.Module):
    """Features of a tower are merged, and looked at by a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.tower, self.merge = nn.Embedding(12, 6), Tower(), Merge()
        self.layer, self.head = Looks(), nn.Linear(6, 12)
        self.scale = nn.Linear(6, 1)

    def forward(self, tokens, patches, index):
        features = self.tower(patches)
        scale = self.scale(features[:, :1])
        x = self.merge(self.embed(tokens), features, index, factor=0.5)
        return self.head(x + self.layer(x, features, scale=scale, flag="kept"))


SEEING = {
    "embed": "embed",
    "tower": "unsharded",
    "scale": "unsharded",
    "merge": "merge",
    "layer": "gather",
    "layer.up": "colwise",
    "layer.other": "colwise",
    "layer.down": "rowwise",
    "head": "head",
}


def seeing(sequence: bool) -> tuple[float, int]:
    """How far gradients are from those of the plain model; collectives of the tower, there and back."""
    torch.manual_seed(0)
    model = Sees().double()
    reference = copy.deepcopy(model)
    mesh = build_mesh(MeshConfig(tp=dist.get_world_size()), Env.detect())
    config = ParallelConfig(tensor_parallel=TensorParallelConfig(sequence=sequence))
    parallelize(model, mesh, Plan.of({"blocks": "layer", "tensor": SEEING}), config)
    tokens, patches = torch.randint(12, (3, 4)), torch.randn(3, 2, 6, dtype=torch.float64)
    index = torch.tensor([[0, 1, 2, 0], [0, 0, 0, 0], [2, 0, 0, 1]])
    weight = torch.randn(3, 4, 12, dtype=torch.float64)
    with CommDebugMode() as counted:
        torch.autograd.grad(model.tower(patches).sum(), list(model.tower.parameters()))
    for one in (model, reference):
        (one(tokens, patches, index) * weight).sum().backward()
    named = dict(reference.named_parameters())
    off = [
        (p.grad.full_tensor() - named[name].grad).abs().max().item() for name, p in model.named_parameters()
    ]
    assert all(is_dtensor(p) and p.placements[-1] == Replicate() for p in model.tower.parameters())
    assert len(list(model.tower.parameters())) == 5
    return max(off), counted.get_total_counts()


@pytest.mark.dist
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "whole-sequence"])
def test_features_of_a_whole_tower_get_the_gradients_of_one_process(sequence):
    for error, collectives in run_ranks(seeing, 2, sequence):
        assert error < 1e-12
        assert collectives == 0


class Scaled(nn.Embedding):
    """As that of Gemma in `transformers`."""

    def forward(self, input):
        return 8 * super().forward(input)


def refusals() -> dict[str, str]:
    """What is said of plans and models that do not fit two ranks."""
    mesh = build_mesh(MeshConfig(tp=2), Env.detect())
    padded = Own()
    padded.embed = nn.Embedding(12, 6, padding_idx=0)
    scaled, bounded = Own(), Own()
    scaled.embed, bounded.embed = Scaled(12, 6), nn.Embedding(12, 6, max_norm=1.0)
    cases = {
        "odd width": (Own(hidden=7), {"tensor": ROLES}),
        "vocabulary of one": (Own(vocab=1), {"tensor": ROLES}),
        "odd heads": (Own(), {"tensor": ROLES, "divisible": {"num_heads": 3}}),
        "no role": (Own(), {"tensor": {k: v for k, v in ROLES.items() if k != "norm"}}),
        "wrong kind": (Own(), {"tensor": ROLES | {"norm": "colwise"}}),
        "padding": (padded, {"tensor": ROLES}),
        "own embedding": (scaled, {"tensor": ROLES}),
        "max norm": (bounded, {"tensor": ROLES}),
        "two roles": (Own(), {"tensor": ROLES | {"nor*": "head_norm"}}),
    }
    tied = Own(hidden=6)
    tied.layers[0].down.weight = tied.layers[0].up.weight
    cases |= {
        "tied": (tied, {"tensor": ROLES}),
        "unsharded and another": (Own(), {"tensor": ROLES | {"nor*": "unsharded"}}),
        "three heads": (Own(), {"tensor": ROLES, "output_units": {"layers.*.up": [3]}}),
        "heads of a sum": (Own(), {"tensor": ROLES, "output_units": {"layers.*.down": [1]}}),
        "experts": (Own(), {"tensor": {"layers": "unsharded"} | ROLES, "experts": ["layers.*"]}),
        "size of a mount": (
            nn.ModuleDict({"text": Own()}),
            {"blocks": [], "mounts": {"text": {"blocks": "layers.*", "divisible": {"num_heads": 3}}}},
        ),
        "role in a mount": (
            nn.ModuleDict({"text": Own()}),
            {"blocks": [], "mounts": {"text": {"blocks": "layers.*", "tensor": ROLES | {"norm": "colwise"}}}},
        ),
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
    model = Sees()
    parallelize(model, mesh, Plan.of({"blocks": "layer", "tensor": SEEING}))
    try:
        model(
            torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 2, 6), torch.zeros(1, 2, dtype=torch.int64)
        )
    except ParallelError as error:
        said["index"] = str(error)
    return said


@pytest.mark.dist
def test_what_cannot_be_cut_is_refused_with_its_reason():
    for said in run_ranks(refusals, 2):
        assert "layers.0.up.weight (7, 6)" in said["odd width"]
        assert "embed.weight (1, 6)" in said["vocabulary of one"]
        assert "3 units of layers.0.up can neither be cut over tp = 2 ranks nor" in said["three heads"]
        assert "layers.0.down is in `output_units` and has the role rowwise" in said["heads of a sum"]
        assert "num_heads = 3" in said["odd heads"]
        assert "no role under tensor parallelism for norm.weight, norm.bias; name them" in said["no role"]
        assert "in the plan, or in `tensor_roles` of the module that has them" in said["no role"]
        assert "norm is a LayerNorm" in said["wrong kind"]
        assert "padding_idx" in said["padding"]
        assert "which a subclass must not replace" in said["own embedding"] and "max_norm" in said["max norm"]
        assert "'nor*' of the plan gives norm a second role" in said["two roles"]
        assert "sequence of 3 tokens" in said["odd sequence"]
        assert "layers.0.down.weight is also a parameter of another module" in said["tied"]
        assert "'nor*' of the plan gives norm a second role" in said["unsharded and another"]
        assert "layers.0 is a layer of experts inside of layers, whose role is whole" in said["experts"]
        assert "text.num_heads = 3" in said["size of a mount"]
        assert "text.norm is a LayerNorm" in said["role in a mount"]
        assert "an index of 2 tokens, and 2 tokens on each of 2 ranks" in said["index"]


@pytest.mark.parametrize(("before", "after"), [(False, True), (True, True), (False, False)])
def test_overlap_enables_the_group_where_torch_wants_that_and_is_refused_where_it_would_do_nothing(
    before, after, monkeypatch
):
    """2.11 overlaps in groups that were enabled only, and says nothing of others; 2.15 enables all."""
    import torch._inductor.config as inductor
    from torch.distributed import _symmetric_memory

    enabled = {"tp"} if before else set()
    monkeypatch.setattr(_symmetric_memory, "is_symm_mem_enabled_for_group", lambda name: name in enabled)
    turn_on = enabled.add if after else lambda name: None
    monkeypatch.setattr(_symmetric_memory, "enable_symm_mem_for_group", turn_on)
    mesh = SimpleNamespace(device_type="cuda", get_group=lambda: SimpleNamespace(group_name="tp"))
    with inductor.patch(_micro_pipeline_tp=False):
        with nullcontext() if after else pytest.raises(ParallelError, match="nothing would be overlapped"):
            _overlap(mesh)  # type: ignore[arg-type]
        assert inductor._micro_pipeline_tp is after
