"""A model of three sub-models, each with its own plan, under every layout against one process.

B rows, T tokens, n images of S places of P numbers, D width.
"""

from functools import cache
from typing import Any

import pytest
import torch
from forge_parallel import (
    Env,
    Mesh,
    MeshConfig,
    ParallelConfig,
    ParallelError,
    PipelineConfig,
    Plan,
    TensorParallelConfig,
    build_mesh,
    build_runner,
    clip_,
    global_norm,
    keep_stage,
    load_full,
    materialize,
    parallelize,
    stages_of,
)
from forge_parallel.compile_config import CompileConfig
from forge_parallel.config import ActivationCheckpointingConfig, FSDPConfig
from forge_parallel.testing import run_ranks
from parity import full, parameters
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

pytestmark = pytest.mark.dist

VOCAB, TOKENS, DIM, HEAD, PLACES, PIXELS, LAYERS, GLOBAL, STEPS = 20, 8, 16, 4, 3, 5, 4, 8, 4
MICRO_BATCHES, CLIP = 2, 0.01
PARTS = ("encoder", "connector", "decoder")
HAS_IMAGE = ([0, 0, 0, 0, 1, 1, 0, 1], [0, 0, 1, 0, 1, 1, 1, 1])
"""Rows with an image in even and in odd steps: two data ranks have none on the first, four never; there are
micro-batches without any, and others of unlike numbers of images."""


class Attention(nn.Module):
    """Of tokens to each other, or to features. A rank may have some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor, features: Tensor | None = None) -> Tensor:
        source = x if features is None else features
        query, key, value = (
            linear(y).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for linear, y in ((self.wq, x), (self.wk, source), (self.wv, source))
        )
        return self.wo(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Block(nn.Module):
    """Of the tower, and of the decoder, whose blocks look at the features too."""

    def __init__(self, crossed: bool = False) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), Attention()
        self.cross = Attention() if crossed else None
        self.ffn_norm, self.ffn = nn.LayerNorm(DIM), FeedForward()

    def forward(self, x: Tensor, features: Tensor | None = None) -> Tensor:
        normed = self.norm(x)
        out = x + self.attention(normed)
        if self.cross is not None:
            out = out + self.cross(normed, features=features)
        return out + self.ffn(self.ffn_norm(out))


class Tower(nn.Module):
    """Patches [n, S, P] -> [n, S, D]. One of its parameters is in no unit and in no module below it."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(PLACES, DIM))
        self.patch, self.norm = nn.Linear(PIXELS, DIM), nn.LayerNorm(DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, patches: Tensor) -> Tensor:
        x = self.patch(patches) + self.position
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def parallel_plan(self) -> dict[str, Any]:
        units = [["patch", "norm"]]
        return {
            "blocks": "blocks.*",
            "units": units,
            "tensor": {"": "unsharded"},
            "fed_by": {"": ["patches"]},
        }


class Connector(nn.Linear):
    def parallel_plan(self) -> dict[str, Any]:
        return {"blocks": [], "units": [[""]], "tensor": {"": "unsharded"}, "fed_by": {"": ["patches"]}}


class Merge(nn.Module):
    def forward(self, x: Tensor, features: Tensor, index: Tensor) -> Tensor:
        """Features [B, S, D] in the place of tokens [B, T, D] whose index [B, T] is 1 + their place."""
        index = index[..., None]
        taken = features.gather(1, (index - 1).clamp(min=0).expand(-1, -1, DIM))
        return torch.where(index > 0, taken, x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.merge = nn.Embedding(VOCAB, DIM), Merge()
        self.layers = nn.ModuleDict({str(i): Block(crossed=True) for i in range(LAYERS)})
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def parallel_plan(self) -> dict[str, Any]:
        outside = [name for name in ("embed", "norm", "head") if getattr(self, name) is not None]
        units = [[name for name in names if name in outside] for names in (["embed"], ["norm", "head"])]
        return {
            "blocks": "layers.*",
            "units": [unit for unit in units if unit],
            "tensor": {name: name for name in outside}
            | {"merge": "merge", "layers.*.norm": "norm", "layers.*.ffn_norm": "norm"}
            | {f"layers.*.{name}": "gather" for name in ("attention", "cross", "ffn")}
            | {"layers.*.*.w[qkv]": "colwise", "layers.*.*.wo": "rowwise"}
            | {"layers.*.ffn.up": "colwise", "layers.*.ffn.down": "rowwise"},
            "divisible": {"num_heads": DIM // HEAD},
        }


class Composite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.connector, self.decoder = Tower(), Connector(DIM, DIM), Decoder()

    def forward(
        self,
        tokens: Tensor | None = None,
        index: Tensor | None = None,
        patches: Tensor | None = None,
        image_of: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Logits; `image_of` [B] says which image a row has, -1 none. A stage passes [B, T + S, D] on."""
        if hidden is None:
            features = self.connector(self.encoder(patches))
            features = torch.cat([torch.zeros_like(features[:1]), features])[image_of + 1]
            x = self.decoder.merge(self.decoder.embed(tokens), features, index)
        else:
            assert tokens is patches is image_of is None, "inputs of the first stage"
            x, features = hidden.split([hidden.shape[1] - PLACES, PLACES], 1)
        for layer in self.decoder.layers.values():
            x = layer(x, features)
        if self.decoder.head is None:
            return torch.cat([x, features], 1)
        return self.decoder.head(self.decoder.norm(x))

    def parallel_plan(self) -> dict[str, Any]:
        parts = [name for name in PARTS if getattr(self, name) is not None]
        return {
            "blocks": [],
            "mounts": {name: getattr(self, name).parallel_plan() for name in parts},
            "sequence_inputs": ["tokens", "index"],
            "stages": {
                "first": ["encoder", "connector", "decoder.embed"],
                "last": ["decoder.norm", "decoder.head"],
                "blocks": "decoder.layers.*",
                "hidden": "hidden",
                "instead_of": ["tokens"],
                "first_inputs": ["patches", "image_of"],
                "extra_tokens": PLACES,
                "dim": DIM,
                "first_cost": 1000,
            },
        }


def batch(step: int, mesh: Mesh, stages: list[int]) -> list[tuple[dict[str, Tensor], Tensor]]:
    """This rank's micro-batches: inputs and labels. A rank without the first stage has no images."""
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(VOCAB, (2, GLOBAL, TOKENS), generator=generator)
    images = torch.randn(GLOBAL, PLACES, PIXELS, generator=generator, dtype=torch.float64)
    has_image = torch.tensor(HAS_IMAGE[step % 2])
    index = torch.zeros(GLOBAL, TOKENS, dtype=torch.int64)
    for row in has_image.nonzero().flatten().tolist():
        index[row, row % 5 : row % 5 + PLACES] = torch.arange(PLACES) + 1
    mine = torch.arange(GLOBAL).chunk(mesh.batch.size)[mesh.batch.rank]
    micro_batches = []
    for rows in mine.chunk(MICRO_BATCHES):
        shown = has_image[rows]
        inputs = {"tokens": tokens[rows], "index": index[rows]}
        if 0 in stages:
            blank = torch.zeros(1, PLACES, PIXELS, dtype=torch.float64)
            inputs["patches"] = images[rows][shown > 0] if shown.any() else blank
            inputs["image_of"] = torch.where(shown > 0, shown.cumsum(0) - 1, -1)
        micro_batches.append((inputs, labels[rows]))
    return micro_batches


def build(sizes: dict[str, int], config: ParallelConfig, frozen: str) -> tuple[list[nn.Module], Mesh]:
    """On one rank the model is plain."""
    env = Env.detect()
    mesh = build_mesh(MeshConfig(**sizes), env) if env.world_size > 1 else Mesh(env.device)
    torch.compiler.reset()  # the compiler counts the kinds of one block over the jobs of a process
    torch.manual_seed(0)
    weights = dict(Composite().double().named_parameters())
    parts = []
    for stage in stages_of(mesh.pipeline.rank, mesh.pipeline.size, config.pipeline):
        with torch.device("meta"):
            part = Composite().double()
        for name in filter(None, frozen.split("+")):
            part.get_submodule(name).requires_grad_(False)
        keep_stage(part, Plan.of(part), stage, mesh.pipeline.size, config.pipeline)
        if env.world_size > 1:
            parallelize(part, mesh, Plan.of(part), config)
        materialize(part, env.device)
        load_full(part, {name: weights[name] for name, _ in part.named_parameters()})
        parts.append(part)
    return parts, mesh


def trained(sizes: dict[str, int], config: ParallelConfig, frozen: str) -> dict[str, Any]:
    """Losses, norms, the loss of a batch of no step, and weights before and after."""
    parts, mesh = build(sizes, config, frozen)
    runner, held = build_runner(parts, mesh), parameters(parts)
    stages = stages_of(mesh.pipeline.rank, mesh.pipeline.size, config.pipeline)
    trains = [parameter for parameter in held.values() if parameter.requires_grad]
    spare = torch.zeros(1, requires_grad=True)  # an optimizer wants a parameter, and a stage may be frozen
    optimizer = torch.optim.AdamW(trains or [spare], lr=1e-2, eps=1e-5)
    found: dict[str, Any] = {"loss": [], "norm": [], "before": full(held)}

    def summed(losses: list[Tensor]) -> float:
        total = torch.stack([torch.zeros((), dtype=torch.float64), *losses]).sum()
        return mesh.pipeline.sum_(mesh.loss.sum_(total)).item()

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / (GLOBAL * TOKENS)

    for step in range(STEPS):
        micro_batches, losses = batch(step, mesh, stages), []
        rest = iter(micro_batches)

        def finish(logits, rest=rest, losses=losses):
            loss = loss_of(logits, next(rest)[1])
            losses.append(loss.detach())
            return loss

        runner.backward([inputs for inputs, _ in micro_batches], finish)
        norm = global_norm(held.values(), mesh)
        clip_(held.values(), CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()
        found["loss"].append(summed(losses))
        found["norm"].append(norm.item())
    with torch.no_grad():
        outs = [(runner.forward(inputs), labels) for inputs, labels in batch(STEPS + 1, mesh, stages)]
    found["validation"] = summed([loss_of(out, labels) for out, labels in outs if out is not None])
    return found | {"after": full(held)}


def refusal(sizes: dict[str, int], config: ParallelConfig) -> str:
    parts, mesh = build(sizes, config, frozen="")
    with pytest.raises(ParallelError) as refused:
        build_runner(parts, mesh)
    return str(refused.value)


@cache
def single(frozen: str) -> dict[str, Any]:
    return run_ranks(trained, 1, {}, ParallelConfig(), frozen)[0]


WHOLE = ParallelConfig(tensor_parallel=TensorParallelConfig(sequence=False))
LAYOUTS = {
    "fsdp2": (2, {}, ParallelConfig()),
    "hsdp2x2": (4, {"dp_replicate": 2}, ParallelConfig()),
    "replicate2": (2, {"dp_replicate": 2}, ParallelConfig(fsdp=FSDPConfig(prefetch=1))),
    "tp2": (2, {"tp": 2}, ParallelConfig()),
    "tp2-whole-sequence": (2, {"tp": 2}, WHOLE),
    "fsdp2-tp2": (4, {"tp": 2}, ParallelConfig()),
    "pp2": (2, {"pp": 2}, ParallelConfig()),
    "pp2-interleaved": (2, {"pp": 2}, ParallelConfig(pipeline=PipelineConfig(schedule="interleaved_1f1b"))),
    "pp2-fsdp2": (4, {"pp": 2}, ParallelConfig()),
    "pp2-tp2-whole-sequence": (4, {"pp": 2, "tp": 2}, WHOLE),
    "fsdp2-tp2-checkpointed-compiled": (
        4,
        {"tp": 2},
        ParallelConfig(
            activation_checkpointing=ActivationCheckpointingConfig(mode="full"),
            compile=CompileConfig(enabled=True, backend="aot_eager"),
        ),
    ),
}
SLOW = ("replicate2", "fsdp2-tp2", "pp2-fsdp2", "fsdp2-tp2-checkpointed-compiled")


@pytest.mark.parametrize(
    "frozen", ["", "encoder", "encoder+decoder"], ids=["trained", "tower", "all-but-connector"]
)
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in LAYOUTS]
)
def test_composite_in_float64_equals_one_process(layout, frozen):
    one, (world_size, sizes, config) = single(frozen), LAYOUTS[layout]
    moved = {name: not torch.equal(value, one["before"][name]) for name, value in one["after"].items()}
    assert all(moved[name] is (name.partition(".")[0] not in frozen.split("+")) for name in moved)
    assert min(one["norm"]) > CLIP, "clipping is active in every step"
    for many in run_ranks(trained, world_size, sizes, config, frozen, timeout_s=120):
        for key in ("loss", "norm", "validation"):
            assert many[key] == pytest.approx(one[key], rel=1e-10), key
        assert many["after"].keys() == one["after"].keys()
        for key, value in one["after"].items():
            assert torch.equal(many["before"][key], one["before"][key]), key
            assert (many["after"][key] - value).abs().max() <= 1e-10 * value.abs().max(), key


def test_features_behind_hidden_states_are_refused_where_tokens_are_cut():
    for said in run_ranks(refusal, 4, {"pp": 2, "tp": 2}, ParallelConfig()):
        assert f"pass on {PLACES} rows beside the tokens" in said
