"""An `nn.Module` of this test's own, started by forge-model, made parallel by the same call."""

import hashlib
from functools import partial

import pytest
import torch
from forge_model.init import Init, initialize
from forge_parallel.apply import materialize, parallelize, set_sync
from forge_parallel.compile_config import CompileConfig
from forge_parallel.config import (
    ActivationCheckpointingConfig,
    MeshConfig,
    ParallelConfig,
    PrecisionConfig,
)
from forge_parallel.env import Env
from forge_parallel.grads import clip_, global_norm
from forge_parallel.mesh import Mesh, build_mesh
from forge_parallel.plan import Plan
from forge_parallel.tensor import is_dtensor, local_shard
from forge_parallel.testing import assert_matches_single, run_ranks
from torch import nn

pytestmark = pytest.mark.dist

VOCABULARY, DIM, HIDDEN, DEPTH = 37, 20, 53, 3
GLOBAL_BATCH, TOKENS, STEPS = 8, 6, 10
MICRO_BATCHES = 2
CLIP = 0.1
CPU = torch.device("cpu")
EXACT = {"loss": 1e-5, "grad_norm": 1e-4}


class Tagger(nn.Module):
    """Predicts a class a token. Sizes do not divide by the ranks; the gate has fewer rows than there are."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.inlet = nn.Embedding(VOCABULARY, DIM)
        self.stack = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM))
            for _ in range(DEPTH)
        )
        self.norm = nn.LayerNorm(DIM)
        self.gate = nn.Linear(DIM, 1)
        self.outlet = nn.Linear(DIM, VOCABULARY, bias=False)
        if tied:
            self.outlet.weight = self.inlet.weight

    def initial_values(self) -> dict[str, Init]:
        gains = {
            name for name, p in self.named_parameters() if "norm" in name or (".0." in name and p.ndim == 1)
        }
        return {
            name: Init("constant", float(name.endswith("weight"))) if name in gains else Init("normal", 0.3)
            for name, _ in self.named_parameters()
        }

    def forward(self, tokens):
        x = self.inlet(tokens)
        for block in self.stack:
            x = x + block(x)
        x = self.norm(x)
        return self.outlet(x * self.gate(x).sigmoid())


def plan(tied: bool) -> Plan:
    units = [] if tied else [["inlet"], ["norm", "gate", "outlet"]]
    return Plan.of({"blocks": "stack.*", "units": units})


def build(sizes: dict, options: dict, tied: bool) -> tuple[nn.Module, Mesh]:
    """On one rank with float32 compute the model is not wrapped at all."""
    env = Env.detect()
    sharded = env.world_size > 1 or "precision" in options
    mesh = build_mesh(MeshConfig(**sizes if env.world_size > 1 else {}), env) if sharded else Mesh(CPU)
    with torch.device("meta"):
        model = Tagger(tied)
    parallelize(model, mesh, plan(tied), ParallelConfig(**options))
    materialize(model, CPU)
    initialize(model, seed=3, shard=local_shard)
    return model, mesh


def digest(model: nn.Module) -> str:
    state = hashlib.sha256()
    for name, p in model.named_parameters():
        full = p.full_tensor() if is_dtensor(p) else p  # type: ignore[attr-defined]
        state.update(name.encode() + full.detach().numpy().tobytes())
    return state.hexdigest()


def initial_weights(sizes: dict, tied: bool) -> str:
    return digest(build(sizes, {}, tied)[0])


def curves(sizes: dict, options: dict, tied: bool = False) -> dict[str, list[float]]:
    """Ten clipped AdamW steps over two micro-batches each."""
    model, mesh = build(sizes, options, tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = partial(torch.randint, VOCABULARY, generator=torch.Generator().manual_seed(1))
    found = {"loss": [], "grad_norm": []}
    for _ in range(STEPS):
        tokens, labels = draw(size=(GLOBAL_BATCH, TOKENS)), draw(size=(GLOBAL_BATCH, TOKENS))
        mine = torch.arange(GLOBAL_BATCH).chunk(mesh.batch.size)[mesh.batch.rank]
        total = torch.zeros(())
        for index, rows in enumerate(mine.chunk(MICRO_BATCHES)):
            set_sync(model, last=index == MICRO_BATCHES - 1)
            logits = model(tokens[rows]).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[rows].flatten(), reduction="sum")
            (loss / labels.numel()).backward()
            total += loss.detach() / labels.numel()
        norm = global_norm(model.parameters(), mesh)
        assert norm > CLIP, "clipping must matter here"
        clip_(model.parameters(), CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()
        found["loss"].append(mesh.loss.sum_(total).item())
        found["grad_norm"].append(norm.item())
    return found


LAYOUTS = [(2, {}), (4, {}), (4, {"dp_replicate": 2, "dp_shard": 2})]
NAMES = ["fsdp-2", "fsdp-4", "hsdp-2x2"]


QUICK = ("fsdp-2-untied", "hsdp-2x2-tied")
CASES = [
    pytest.param(*layout, tied, id=name, marks=[] if name in QUICK else [pytest.mark.slow])
    for layout, of in zip(LAYOUTS, NAMES, strict=True)
    for tied in (False, True)
    for name in [f"{of}-{'tied' if tied else 'untied'}"]
]


@pytest.mark.parametrize(("world_size", "sizes", "tied"), CASES)
def test_own_module_trains_like_one_process(world_size, sizes, tied):
    assert_matches_single(curves, world_size, sizes, {}, tied, rtol=EXACT)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_own_module_starts_with_the_same_bits_in_every_layout(tied):
    [single] = run_ranks(initial_weights, 1, {}, tied)
    for world_size, sizes in LAYOUTS:
        assert run_ranks(initial_weights, world_size, sizes, tied) == [single] * world_size


@pytest.mark.slow
def test_own_module_checkpointed_and_compiled_trains_like_one_process():
    [plain] = run_ranks(curves, 1, {}, {})
    options = {
        "activation_checkpointing": ActivationCheckpointingConfig(mode="full"),
        "compile": CompileConfig(enabled=True, backend="aot_eager"),
    }
    for found in run_ranks(curves, 4, {"dp_replicate": 2}, options, timeout_s=120):
        for name, bound in EXACT.items():
            assert found[name] == pytest.approx(plain[name], rel=bound)


def test_own_module_in_bf16_with_everything_composed_stays_near_float32():
    options = {
        "precision": PrecisionConfig(compute="bfloat16"),
        "activation_checkpointing": ActivationCheckpointingConfig(mode="full"),
        "compile": CompileConfig(enabled=True, backend="aot_eager"),
    }
    [plain] = run_ranks(curves, 1, {}, {})
    found = run_ranks(curves, 2, {}, options, timeout_s=120)[0]
    assert found["loss"] != plain["loss"]
    assert found["loss"] == pytest.approx(plain["loss"], rel=5e-3)
    assert found["grad_norm"] == pytest.approx(plain["grad_norm"], rel=5e-2)
