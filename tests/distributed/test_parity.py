"""Ten steps under every layout against one process that shards nothing: losses, norms, weights."""

from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from forge_data.loader import MicroBatch
from forge_model import DecoderConfig, LossConfig, initialize
from forge_model.attention_config import GroupedQueryConfig
from forge_model.ffn_config import MLPConfig, SwiGLUConfig
from forge_model.norm_config import LayerNormConfig
from forge_parallel import (
    Env,
    Mesh,
    MeshConfig,
    ParallelConfig,
    Plan,
    build_mesh,
    local_shard,
    materialize,
    parallelize,
)
from forge_parallel.config import (
    PIPELINES,
    ActivationCheckpointingConfig,
    CompileConfig,
    ContextParallelConfig,
    PipelineConfig,
    TensorParallelConfig,
)
from forge_parallel.stages import keep_stage, stages_of
from forge_parallel.testing import run_ranks
from forge_trainer.optim import AdamWConfig, trainable
from forge_trainer.schedule import CosineConfig
from forge_trainer.steps.text import TextStep
from forge_trainer.steps.update import Update

VOCAB, TOKENS, GLOBAL, STEPS = 68, 16, 16, 10
LAYOUTS = {
    "fsdp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "fsdp2-tp2": (4, {"tp": 2}),
    "replicate2": (2, {"dp_replicate": 2}),
    "hsdp2x2": (4, {"dp_replicate": 2}),
    "replicate2-tp2": (4, {"dp_replicate": 2, "tp": 2}),
    "tp4": (4, {"tp": 4}),
    "cp2": (2, {"cp": 2}),
    "cp4": (4, {"cp": 4}),
    "fsdp2-cp2": (4, {"cp": 2}),
    "replicate2-cp2": (4, {"dp_replicate": 2, "cp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2-fsdp2": (4, {"pp": 2}),
    "pp2-replicate2": (4, {"pp": 2, "dp_replicate": 2}),
    "pp2-tp2": (4, {"pp": 2, "tp": 2}),
    "pp2-cp2": (4, {"pp": 2, "cp": 2}),
    "pp2-fsdp2-tp2": (8, {"pp": 2, "tp": 2}),
    "cp2-tp2": (4, {"cp": 2, "tp": 2}),
    "fsdp2-cp2-tp2": (8, {"cp": 2, "tp": 2}),
    "hsdp2x2-tp2": (8, {"dp_replicate": 2, "tp": 2}),
}
PARTS = {"vocab_size": VOCAB, "dim": 32, "num_layers": 2, "max_tokens": TOKENS}
HEADS = GroupedQueryConfig(num_heads=4, num_kv_heads=4)
BIASED = GroupedQueryConfig(num_heads=4, num_kv_heads=4, bias=True, output_bias=True)
WINDOWED = GroupedQueryConfig(num_heads=4, num_kv_heads=4, sliding_window=5, qk_norm=True)
MODELS = {
    "plain": DecoderConfig(**PARTS, attention=HEADS),
    "biased": DecoderConfig(**PARTS, attention=BIASED, ffn=SwiGLUConfig(bias=True)),
    "tied": DecoderConfig(**PARTS, attention=HEADS, tie_embeddings=True),
    "windowed": DecoderConfig(**PARTS, attention=WINDOWED),
    "deep": DecoderConfig(**PARTS | {"num_layers": 5}, attention=WINDOWED),
    "layernorm": DecoderConfig(**PARTS, attention=HEADS, norm=LayerNormConfig(bias=True), ffn=MLPConfig()),
}
FAMILIES = [name for name in MODELS if name != "deep"]


def batch(index: int, mesh: Mesh, micro_batches: int = 2) -> list[MicroBatch]:
    """This rank's part, in some micro-batches, of packed documents with unequal counts of valid targets."""
    generator = torch.Generator().manual_seed(index)
    rows = torch.randint(VOCAB, (GLOBAL, TOKENS + 1), generator=generator)
    ends = torch.rand(GLOBAL, TOKENS + 1, generator=generator) < 0.2
    doc_ids = ends.cumsum(1)
    labels = rows[:, 1:].clone()
    for row in range(GLOBAL):
        labels[row, : row % (TOKENS + 1)] = -100
    mine = torch.arange(GLOBAL).chunk(mesh.batch.size)[mesh.batch.rank]
    return [
        MicroBatch(
            {"tokens": rows[part, :-1], "labels": labels[part], "doc_ids": doc_ids[part, :-1]},
            {"targets": (labels[part] >= 0).sum()},
        )
        for part in mine.chunk(micro_batches)
    ]


def trained(sizes: dict, name: str, dtype: str, parallel: ParallelConfig) -> dict[str, list]:
    """Losses, norms, and the weights before and after."""
    env = Env.detect()
    mesh = build_mesh(MeshConfig(**sizes), env) if env.world_size > 1 else Mesh(env.device)
    parts = []
    for stage in stages_of(mesh.pipeline.rank, mesh.pipeline.size, parallel.pipeline):
        with torch.device("meta"):
            model = MODELS[name].build().to(getattr(torch, dtype))
        keep_stage(model, Plan.of(model), stage, mesh.pipeline.size, parallel.pipeline)
        if env.world_size > 1:
            parallelize(model, mesh, Plan.of(model), parallel)
        parts.append(materialize(model, mesh.device))
        initialize(model, 3, local_shard)
    before = full(parts)
    optimizer = AdamWConfig(lr=3e-3).build(trainable(parts))
    factor = partial(CosineConfig(warmup_steps=2).factor, steps=20)
    update = Update(parts, optimizer, factor, 0.5, mesh)
    step = TextStep(parts, LossConfig(chunk_tokens=5, z_loss_weight=1e-3).build(), mesh, update=update)
    count = 4 if name == "deep" else 2
    outs = [step.train(batch(index, mesh, count), index) for index in range(STEPS)]
    return {
        "loss": [out.loss.item() for out in outs],
        "norm": [out.grad_norm.item() for out in outs],
        "before": before,
        "validation": step.evaluate([batch(STEPS, mesh)])["loss"],
        "after": full(parts),
    }


def full(parts: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Every parameter, put together from what each rank says it holds."""
    mine = {name: parameter for part in parts for name, parameter in part.named_parameters()}
    shards = {name: (parameter.shape, local_shard(parameter)) for name, parameter in mine.items()}
    boxes = {name: (shape, shard.values.clone(), shard.offsets) for name, (shape, shard) in shards.items()}
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, boxes)
    found: dict = {}
    for name, (shape, values, offsets) in (item for boxes in everyone for item in boxes.items()):
        found.setdefault(name, torch.full(shape, torch.nan, dtype=values.dtype))
        found[name][tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))] = values
    return found


@cache
def single(name: str, dtype: str) -> dict[str, list]:
    return run_ranks(trained, 1, {}, name, dtype, ParallelConfig())[0]


def check(layout: str, name: str, dtype: str, parallel: ParallelConfig, loss: float, norm: float) -> None:
    world_size, sizes = LAYOUTS[layout]
    one = single(name, dtype)
    assert min(one["norm"]) > 0.5, "clipping is active in every step"
    for many in run_ranks(trained, world_size, sizes, name, dtype, parallel, timeout_s=120):
        assert many["loss"] == pytest.approx(one["loss"], rel=loss)
        assert many["norm"] == pytest.approx(one["norm"], rel=norm)
        assert many["validation"] == pytest.approx(one["validation"], rel=loss)
        assert many["after"].keys() == one["after"].keys()
        for key, value in one["before"].items():
            assert torch.equal(many["before"][key], value), key
        for key, value in one["after"].items():
            assert (many["after"][key] - value).abs().max() <= norm * value.abs().max(), key


def slow(names, *fast: str):
    """Parameters of a test, all but some marked slow."""
    return [pytest.param(name, marks=[] if name in fast else [pytest.mark.slow]) for name in names]


SHORT = ("fsdp2", "hsdp2x2", "fsdp2-tp2", "fsdp2-cp2", "cp2-tp2", "pp2-fsdp2", "pp2-tp2", "pp2-cp2")
"""What every run of the tests looks at; the others are slow."""


@pytest.mark.dist
@pytest.mark.parametrize("layout", slow(LAYOUTS, *SHORT))
def test_training_equals_one_process(layout):
    check(layout, "plain", "float32", ParallelConfig(), loss=1e-5, norm=1e-4)


@pytest.mark.dist
@pytest.mark.parametrize("sequence", slow(["sequence", "whole-sequence"], "sequence"))
@pytest.mark.parametrize("name", FAMILIES)
def test_tensor_parallel_training_in_float64_equals_one_process(name, sequence):
    parallel = ParallelConfig(tensor_parallel=TensorParallelConfig(sequence=sequence == "sequence"))
    check("tp2", name, "float64", parallel, loss=1e-10, norm=1e-10)


@pytest.mark.dist
def test_sharded_training_with_tied_embeddings_in_float64_equals_one_process():
    parallel = ParallelConfig(activation_checkpointing=ActivationCheckpointingConfig(mode="full"))
    check("fsdp2", "tied", "float64", parallel, loss=1e-10, norm=1e-10)


@pytest.mark.dist
@pytest.mark.parametrize("schedule", slow(PIPELINES, "interleaved_1f1b", "zbv_zero_bubble"))
def test_pipelined_training_in_float64_equals_one_process(schedule):
    parallel = ParallelConfig(pipeline=PipelineConfig(schedule=schedule))
    check("pp2", "deep", "float64", parallel, loss=1e-10, norm=1e-10)


@pytest.mark.dist
@pytest.mark.parametrize("method", ["gather", "ulysses"])
@pytest.mark.parametrize("name", slow(FAMILIES, "plain", "windowed"))
def test_context_parallel_training_in_float64_equals_one_process(name, method):
    parallel = ParallelConfig(context_parallel=ContextParallelConfig(method=method))
    check("cp2", name, "float64", parallel, loss=1e-10, norm=1e-10)


@pytest.mark.dist
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(activation_checkpointing=ActivationCheckpointingConfig(mode="selective")),
        pytest.param(
            ParallelConfig(compile=CompileConfig(enabled=True, backend="aot_eager")), marks=pytest.mark.slow
        ),
    ],
    ids=["selective", "compiled"],
)
def test_sharded_tensor_parallel_training_in_float64_equals_one_process(parallel):
    check("fsdp2-tp2", "plain", "float64", parallel, loss=1e-10, norm=1e-10)
