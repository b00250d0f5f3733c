"""Side inputs that need gradients, such as features of a trained tower, under layouts against one process."""

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from forge_model import DecoderConfig, initialize
from forge_model.config import FfnConfig, GroupedQueryConfig, LayerOverride, NormConfig, StandardBlockConfig
from forge_model.decoder.block import Block
from forge_model.layers import Linear
from forge_parallel import (
    ActivationCheckpointingConfig,
    CompileConfig,
    Env,
    MeshConfig,
    ParallelConfig,
    Plan,
    TensorParallelConfig,
    build_mesh,
    local_shard,
    materialize,
    parallelize,
)
from forge_parallel.testing import run_ranks
from torch import nn

TOKENS = torch.arange(48).view(4, 12) % 29
FEATURES = torch.linspace(-1, 1, 4 * 3 * 16).view(4, 3, 16)
GAINS = torch.linspace(0.5, 1.5, 4)


class GainedConfig(NormConfig):
    needs: ClassVar = {"gain": "other"}

    def build(self, dim):
        return Gained(dim, eps=self.eps)


class Gained(nn.RMSNorm):
    def forward(self, x, gain):
        return super().forward(x) * gain[:, None, None]


class LookingConfig(FfnConfig):
    """A feed-forward that adds what each token finds in features [B, S, D]."""

    needs: ClassVar = {"features": "other"}

    def hidden(self, dim):
        return 2 * dim

    def build(self, dim):
        return Looking(dim, self.hidden(dim))

    def forward_flops(self, dim):
        return 8 * dim * dim


class Looking(nn.Module):
    residual_writers: ClassVar = ("w_out.weight",)
    tensor_roles: ClassVar = {"": "gather", "w_in": "colwise", "w_see": "colwise", "w_out": "rowwise"}

    def __init__(self, dim, hidden):
        super().__init__()
        self.w_in, self.w_see = Linear(dim, hidden, bias=False), Linear(dim, hidden, bias=False)
        self.w_out = Linear(hidden, dim, bias=False)

    def forward(self, x, features):
        return self.w_out(F.silu(self.w_in(x)) * self.w_see(features).mean(1, keepdim=True))


class SeeingConfig(StandardBlockConfig):
    """A block that adds features itself, before its attention."""

    needs: ClassVar = {"features": "other"}

    def build(self, layer, dim):
        return Seeing(layer, dim)


class Seeing(Block):
    def forward(self, x, context):
        return super().forward(x + 0.1 * context.side["features"].mean(1, keepdim=True), context)


def config(kind):
    parts = {
        "ffn": {"overrides": [LayerOverride(layers="1", ffn=LookingConfig())]},
        "norm": {"norm": GainedConfig()},
        "block": {"overrides": [LayerOverride(layers="0", block=SeeingConfig())]},
    }[kind]
    attention = GroupedQueryConfig(num_heads=4, num_kv_heads=2)
    return DecoderConfig(vocab_size=32, dim=16, num_layers=3, max_tokens=16, attention=attention, **parts)


def gradients(kind, sizes, parallel):
    """Of the side input, of a side of the batch, and of all weights as sums of squares, by name."""
    env = Env.detect()
    mesh = build_mesh(MeshConfig(**sizes), env) if env.world_size > 1 else None
    with torch.device("meta"):
        model = config(kind).build().double()
    if mesh is not None:
        parallelize(model, mesh, Plan.of(model), parallel)
    materialize(model, env.device)
    initialize(model, 3, local_shard)
    rows = torch.arange(4)
    if mesh is not None:
        rows = rows.chunk(mesh.batch.size)[mesh.batch.rank]
    name, whole = ("gain", GAINS) if kind == "norm" else ("features", FEATURES)
    side = whole.double().requires_grad_()
    out = model(TOKENS[rows], **{name: side[rows]})
    out.square().mean(-1).sum().backward()
    gradient = side.grad
    if mesh is not None:
        gradient = mesh.batch.sum_(gradient)
    squares = {
        key: _sum(mesh, local_shard(p.grad, mesh) if mesh is not None else None, p)
        for key, p in model.named_parameters()
    }
    return gradient, squares


def _sum(mesh, shard, parameter):
    if mesh is None:
        return parameter.grad.square().sum()
    mine = shard.values.square().sum() * shard.is_first_copy
    return mesh.stage.sum_(mine)


LAYOUTS = {
    "fsdp2": ({"dp_shard": 2}, ParallelConfig()),
    "fsdp2-checkpointed": (
        {"dp_shard": 2},
        ParallelConfig(activation_checkpointing=ActivationCheckpointingConfig(mode="full")),
    ),
    "fsdp2-compiled": (
        {"dp_shard": 2},
        ParallelConfig(compile=CompileConfig(enabled=True, backend="aot_eager")),
    ),
    "tp2": ({"dp_shard": 1, "tp": 2}, ParallelConfig()),
    "tp2-whole": (
        {"dp_shard": 1, "tp": 2},
        ParallelConfig(tensor_parallel=TensorParallelConfig(sequence=False)),
    ),
}


class Sized(nn.Module):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.layer = Linear(4, 4)

    def forward(self, x, *, grids, patches):
        self.seen = grids, patches
        return self.layer(x)


def moved():
    """Whether each input is what the caller gave, where FSDP2 copies all to its device, as on CUDA."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    real = FSDPState._root_pre_forward

    def copied(self, module, args, kwargs):
        args, kwargs = real(self, module, args, kwargs)
        return args, {name: value.clone() for name, value in kwargs.items()}

    FSDPState._root_pre_forward = copied
    try:
        mesh, model = build_mesh(MeshConfig(dp_shard=2), Env.detect()), Sized()
        nn.init.zeros_(model.layer.weight)
        parallelize(model, mesh, Plan.of({"blocks": ["layer"], "host_inputs": ["grids"]}))
        grids, patches = torch.ones(2, 3), torch.ones(2, 3)
        model(torch.ones(1, 4), grids=grids, patches=patches)
        return model.seen[0] is grids, model.seen[1] is patches
    finally:
        FSDPState._root_pre_forward = real


@pytest.mark.dist
def test_host_inputs_are_not_moved_by_fsdp():
    assert run_ranks(moved, 2) == [(True, False), (True, False)]


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["ffn", "norm", "block"])
def test_side_inputs_get_the_gradient_of_one_process(kind, layout):
    sizes, parallel = LAYOUTS[layout]
    if kind == "block" and layout == "tp2":
        with pytest.raises(ValueError, match=r"features.*sequence = false"):
            config(kind).require_axes(2, 1, True, "gather")
        return
    expected, squares = gradients(kind, {}, None)
    for found, ours in run_ranks(gradients, 2, kind, sizes, parallel):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        for name, square in squares.items():
            torch.testing.assert_close(ours[name], square, rtol=1e-9, atol=1e-12, msg=name)
