"""Mixtures of experts under every layout against one process: losses, norms, weights, biases, loads."""

import random
from functools import cache
from typing import NamedTuple

import pytest
import torch
from forge_model import DecoderConfig
from forge_model.config import (
    GroupedQueryConfig,
    LatentConfig,
    LayerOverride,
    MoEConfig,
    SigmoidRouterConfig,
    SoftmaxRouterConfig,
    SwiGLUConfig,
)
from forge_parallel import ParallelConfig, local_shard
from forge_parallel.capabilities import splits_backward
from forge_parallel.compile_config import CompileConfig
from forge_parallel.config import (
    ActivationCheckpointingConfig,
    ContextParallelConfig,
    PipelineConfig,
    TensorParallelConfig,
)
from forge_parallel.dispatch_config import AllToAllConfig, TwoLevelConfig
from forge_parallel.testing import run_ranks
from msgspec.structs import replace
from parity import TOKENS, VOCAB, batch, full, made, parameters
from torch.distributed.tensor.debug import CommDebugMode

SIGMOID = SigmoidRouterConfig(
    groups=4, top_groups=3, scale=1.5, bias_rate=0.02, sequence_balance_weight=0.1, z_loss_weight=0.01
)
MOE = MoEConfig(num_experts=8, top_k=3, dim=24, router=SIGMOID, shared_experts=2, shared_gate=True)
DEEPSEEK = DecoderConfig(
    vocab_size=VOCAB,
    dim=32,
    num_layers=3,
    max_tokens=TOKENS,
    init_std=0.1,
    attention=GroupedQueryConfig(num_heads=4, num_kv_heads=4),
    ffn=MOE,
    overrides=[LayerOverride(layers="0", ffn=SwiGLUConfig(dim=64))],
)
MODELS = {
    "deepseek": DEEPSEEK,
    "mixtral": replace(
        DEEPSEEK,
        ffn=MoEConfig(num_experts=4, top_k=2, dim=24, bias=True, router=SoftmaxRouterConfig(bias=True)),
        overrides=[],
    ),
    "balanced": replace(
        DEEPSEEK,
        ffn=replace(MOE, router=SoftmaxRouterConfig(batch_balance_weight=0.3, sequence_balance_weight=0.1)),
    ),
    "global": replace(
        DEEPSEEK, ffn=replace(MOE, router=replace(SIGMOID, batch_balance_weight=0.3, balance_scope="global"))
    ),
    "scheduled": replace(
        DEEPSEEK,
        ffn=replace(
            MOE,
            scale_gradients=True,
            router=replace(SIGMOID, bias_schedule="linear_warmup", bias_schedule_steps=3),
        ),
    ),
    "deep": replace(DEEPSEEK, num_layers=4),
    "many": replace(DEEPSEEK, ffn=replace(MOE, num_experts=64)),
    "latent": replace(
        DEEPSEEK,
        attention=LatentConfig(num_heads=4, kv_rank=12, q_rank=16, nope_dim=8, rope_dim=4, value_dim=6),
    ),
}
LAYOUTS = {
    "fsdp2": (2, {}),
    "ep2": (2, {"ep": 2}),
    "tp2": (2, {"tp": 2}),
    "cp2-ep2": (2, {"cp": 2, "ep": 2}),
    "ep4": (4, {"ep": 4}),
    "fsdp2-ep2": (4, {"ep": 2}),
    "replicate2-ep2": (4, {"dp_replicate": 2, "ep": 2}),
    "fsdp2-cp2-ep4": (4, {"cp": 2, "ep": 4}),
    "ep2-tp2": (4, {"ep": 2, "tp": 2}),
    "pp2-ep2": (4, {"pp": 2, "ep": 2}),
    "pp2-fsdp2-ep2": (8, {"pp": 2, "ep": 2}),
    "tp4": (4, {"tp": 4}),
    "fsdp2-tp2": (4, {"tp": 2}),
    "cp2-tp2": (4, {"cp": 2, "tp": 2}),
    "ep2-fsdp2-tp2": (8, {"ep": 2, "tp": 2}),
    "pp2-ep2-tp2": (8, {"pp": 2, "ep": 2, "tp": 2}),
}


CHECKPOINTED = ParallelConfig(activation_checkpointing=ActivationCheckpointingConfig(mode="full"))


class Bounds(NamedTuple):
    """How far many ranks may be from one, relatively, after how many steps in which number format."""

    dtype: str
    steps: int
    loss: float
    norm: float
    after: float


FLOAT64 = Bounds("float64", 4, 1e-10, 1e-10, 1e-9)
FLOAT32 = Bounds("float32", 10, 1e-5, 1e-4, 1e-4)
NOT_COUNTED = ("/balance_loss", "/router_z_loss")


def train(sizes: dict, config: DecoderConfig, parallel: ParallelConfig, dtype: str, steps: int) -> dict:
    """What `parity.trained` tells, and the buffers and loads of the layers."""
    parts, _, step, mesh = made(sizes, config, dtype, parallel)
    count = 4 if parallel.pipeline.is_v else 2
    # the load of a global batch is known up to the micro-batch
    together = config == MODELS["global"]
    outs = [step.train(batch(index, mesh, count, together), index) for index in range(steps)]
    return {
        "loss": [out.loss.item() for out in outs],
        "norm": [out.grad_norm.item() for out in outs],
        "metrics": [{name: value.item() for name, value in out.metrics.items()} for out in outs],
        "after": full(parameters(parts)),
        "biases": {name: buffer.clone() for part in parts for name, buffer in part.named_buffers()},
    }


@cache
def single(name: str, bounds: Bounds) -> dict:
    return run_ranks(train, 1, {}, MODELS[name], ParallelConfig(), bounds.dtype, bounds.steps)[0]


def check(layout: str, name: str, parallel: ParallelConfig, bounds: Bounds = FLOAT64) -> None:
    world_size, sizes = LAYOUTS[layout]
    one, biases = single(name, bounds), {}
    options = (sizes, MODELS[name], parallel, bounds.dtype, bounds.steps)
    for many in run_ranks(train, world_size, *options, timeout_s=200):
        assert many["loss"] == pytest.approx(one["loss"], rel=bounds.loss)
        assert many["norm"] == pytest.approx(one["norm"], rel=bounds.norm)
        for mine, reference in zip(many["metrics"], one["metrics"], strict=True):
            assert mine.keys() == reference.keys()
            for key, value in reference.items():
                if "ffn/" in key and not key.endswith(NOT_COUNTED):
                    assert mine[key] == value, key
                elif not key.endswith("/balance_loss") or name == "global":  # of the tokens routed at once
                    assert mine[key] == pytest.approx(value, rel=10 * bounds.loss, abs=1e-12), key
        for key, value in one["after"].items():
            assert (many["after"][key] - value).abs().max() <= bounds.after * value.abs().max(), key
        biases |= many["biases"]
        assert all(torch.equal(bias, one["biases"][key]) for key, bias in many["biases"].items())
    assert biases.keys() == one["biases"].keys()


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["tp2", "cp2-ep2"])
def test_balance_over_a_batch_does_not_depend_on_who_has_which_tokens(layout):
    check(layout, "balanced", ParallelConfig())


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "parallel"),
    [
        ("fsdp2", CHECKPOINTED),
        pytest.param("fsdp2-ep2", CHECKPOINTED, marks=pytest.mark.slow),
        *(
            pytest.param(layout, ParallelConfig(), marks=pytest.mark.slow)
            for layout in ("fsdp2", "pp2-ep2", "tp2", "cp2-ep2", "replicate2-ep2", "ep2-tp2", "pp2-ep2-tp2")
        ),
        pytest.param(
            "ep2-tp2",
            ParallelConfig(tensor_parallel=TensorParallelConfig(sequence=False)),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_balance_over_the_global_batch_does_not_depend_on_the_layout(layout, parallel):
    """Nor does its logged value, which that of a micro-batch of a rank does."""
    assert single("global", FLOAT64)["norm"][1] != single("deepseek", FLOAT64)["norm"][1]
    check(layout, "global", parallel)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "ep2", "pp2-fsdp2-ep2"])
def test_ten_steps_with_balance_over_the_global_batch_in_float32_equal_one_process(layout):
    check(layout, "global", ParallelConfig(), FLOAT32)


@pytest.mark.dist
@pytest.mark.parametrize(
    "layout",
    [
        "fsdp2-ep2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp2", "ep2-tp2", "cp2-ep2", "pp2-ep2")),
    ],
)
def test_scaled_gradients_and_scheduled_bias_do_not_depend_on_the_layout(layout):
    assert single("scheduled", FLOAT64)["norm"][0] != single("deepseek", FLOAT64)["norm"][0]
    check(layout, "scheduled", ParallelConfig())


CUT = ParallelConfig(tensor_parallel=TensorParallelConfig(experts="cut"))
CUT_UNSEQUENCED = ParallelConfig(tensor_parallel=TensorParallelConfig(experts="cut", sequence=False))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "name", "parallel"),
    [
        ("tp2", "deepseek", CUT),
        *(
            pytest.param(layout, name, parallel, marks=pytest.mark.slow)
            for layout, name, parallel in [
                ("tp2", "mixtral", CUT_UNSEQUENCED),
                ("tp2", "deepseek", CUT_UNSEQUENCED),
                ("tp2", "scheduled", CUT),
                ("tp2", "global", CUT),
                ("tp4", "deepseek", CUT),
                ("ep2-tp2", "deepseek", CUT),
                ("ep2-tp2", "mixtral", CUT),
                ("ep2-tp2", "global", CUT_UNSEQUENCED),
                ("fsdp2-tp2", "deepseek", CUT),
                (
                    "fsdp2-tp2",
                    "mixtral",
                    replace(CUT, activation_checkpointing=CHECKPOINTED.activation_checkpointing),
                ),
                ("cp2-tp2", "deepseek", CUT),
                ("pp2-ep2-tp2", "deepseek", CUT),
                ("ep2-fsdp2-tp2", "many", CUT),
            ]
        ),
    ],
)
def test_experts_cut_over_ranks_train_like_one_process(layout, name, parallel):
    check(layout, name, parallel)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "ep2-tp2", "fsdp2-tp2"])
def test_ten_steps_of_experts_cut_over_ranks_in_float32_equal_one_process(layout):
    check(layout, "mixtral", CUT, FLOAT32)


def drawn(seed: int) -> tuple[dict, str, ParallelConfig]:
    """A layout of four ranks, a model, and how it is made parallel."""
    draw = random.Random(seed)
    beside = draw.choice([{}, {"ep": 2}, {"cp": 2}, {"pp": 2}, {"dp_replicate": 2}])
    name = draw.choice(["deepseek", "mixtral", "scheduled", "latent", "global"])
    parallel = ParallelConfig(
        tensor_parallel=TensorParallelConfig(experts="cut", sequence=draw.random() < 0.6),
        context_parallel=ContextParallelConfig(method=draw.choice(["gather", "ring", "ulysses"])),
        expert_parallel=AllToAllConfig(chunks=draw.choice([1, 2])),
        activation_checkpointing=ActivationCheckpointingConfig(
            mode=draw.choice(["none", "full", "selective", "offload"])
        ),
    )
    tp = 2 if beside else draw.choice([2, 4])
    return {"tp": tp} | beside, "deep" if "pp" in beside else name, parallel


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", [0, 10])
def test_random_layouts_of_cut_experts_train_like_one_process(first):
    for seed in range(first, first + 10):
        sizes, name, parallel = drawn(seed)
        one = single(name, FLOAT64)
        for many in run_ranks(train, 4, sizes, MODELS[name], parallel, "float64", 4, timeout_s=200):
            assert many["loss"] == pytest.approx(one["loss"], rel=1e-9), (seed, sizes, parallel)
            assert many["norm"] == pytest.approx(one["norm"], rel=1e-9), (seed, sizes, parallel)
            for key, value in one["after"].items():
                assert (many["after"][key] - value).abs().max() <= 1e-8 * value.abs().max(), (seed, key)


def held(sizes: dict, config: DecoderConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Shapes of what this rank holds in a layer of experts, and collectives of two micro-batches over tp."""
    parts, _, step, mesh = made(sizes, config, "float64", CUT)
    layer = parts[0].get_submodule("layers.1.ffn")
    shapes = {name: tuple(local_shard(one).values.shape) for name, one in layer.named_parameters()}
    step.train(batch(0, mesh), 0)
    with CommDebugMode() as said:
        step.runner.backward([step._inputs(micro) for micro in batch(1, mesh)], lambda terms: terms.total)
    return shapes, {str(op).rpartition(".")[2]: n for op, n in said.get_comm_counts().items()}


@pytest.mark.dist
def test_each_rank_holds_a_part_of_every_expert_and_says_what_theory_does():
    """Beside what a dense model says: two gathers a layer of experts, of who serves and how much."""
    shapes, counts = run_ranks(held, 2, {"tp": 2}, MODELS["deepseek"])[0]
    assert shapes["experts.w_up"] == (8, 12, 32) and shapes["experts.w_down"] == (8, 32, 12)
    assert shapes["shared.w_up.weight"] == (24, 32) and shapes["shared.w_down.weight"] == (32, 24)
    micro, layers, moe = 2, 3, 2
    # embedding and head; attention and feed-forward of each layer, shared experts
    streams = 1 + 2 * layers + moe
    gathered = micro * (streams + streams + 2 * moe)  # forward, backward; pairs
    scattered = micro * (streams + streams + moe)  # forward, backward; the gradient of the weights of pairs
    assert counts["all_gather_into_tensor"] == gathered
    assert counts["reduce_scatter_tensor"] == scattered


COMPILED = ParallelConfig(compile=CompileConfig(enabled=True, backend="aot_eager"))
OTHERS = {
    "chunks": ("ep2", ParallelConfig(expert_parallel=AllToAllConfig(chunks=2))),
    "two levels": ("ep4", ParallelConfig(expert_parallel=TwoLevelConfig(node_ranks=2))),
    "compiled": ("ep2", COMPILED),
    "compiled, checkpointed": (
        "ep2",
        replace(COMPILED, activation_checkpointing=ActivationCheckpointingConfig(mode="full")),
    ),
    "zero bubble": ("pp2-ep2", ParallelConfig(pipeline=PipelineConfig(schedule="zbv_zero_bubble"))),
    "dualpipe": ("pp2-ep2", ParallelConfig(pipeline=PipelineConfig(schedule="dualpipe_v"))),
    "interleaved": ("pp2-ep2", ParallelConfig(pipeline=PipelineConfig(schedule="interleaved_zero_bubble"))),
}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "parallel"),
    [
        ("ep2", CHECKPOINTED),
        ("fsdp2-ep2", ParallelConfig()),
        ("fsdp2-cp2-ep4", ParallelConfig()),
        ("pp2-ep2", ParallelConfig()),
        *(
            pytest.param(layout, ParallelConfig(), marks=pytest.mark.slow)
            for layout in LAYOUTS
            if layout not in ("fsdp2-ep2", "fsdp2-cp2-ep4", "pp2-ep2")
        ),
        pytest.param("ep2-tp2", CHECKPOINTED, marks=pytest.mark.slow),
        pytest.param(
            "ep2-tp2",
            ParallelConfig(tensor_parallel=TensorParallelConfig(sequence=False)),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "fsdp2-ep2",
            ParallelConfig(activation_checkpointing=ActivationCheckpointingConfig(mode="selective")),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pp2-ep2", ParallelConfig(pipeline=PipelineConfig(schedule="gpipe")), marks=pytest.mark.slow
        ),
    ],
)
def test_training_of_experts_in_float64_equals_one_process(layout, parallel):
    check(layout, "deepseek", parallel)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_training_of_experts_by_other_means_equals_one_process(name):
    layout, parallel = OTHERS[name]
    if parallel.pipeline.splits_backward and not splits_backward():
        pytest.skip("needs torch 2.15")
    check(layout, "deep" if layout.startswith("pp") else "deepseek", parallel)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "many", "latent"])
@pytest.mark.parametrize("layout", ["ep2", "fsdp2-ep2", "ep2-tp2", "cp2-ep2", "pp2-ep2"])
def test_training_of_other_experts_in_float64_equals_one_process(layout, name):
    check(layout, name, ParallelConfig())


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek", "mixtral", "many", "latent"])
@pytest.mark.parametrize("layout", ["ep2", "fsdp2-ep2", "pp2-fsdp2-ep2"])
def test_ten_steps_of_experts_in_float32_equal_one_process(layout, name):
    check(layout, name, ParallelConfig(), FLOAT32)
