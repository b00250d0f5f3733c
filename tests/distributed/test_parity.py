"""Ten steps under every layout against one process that shards nothing: losses, norms, weights."""

from functools import cache

import pytest
import torch
from forge_model import DecoderConfig
from forge_model.attention.config import GroupedQueryConfig, LatentConfig
from forge_model.attention.rope_config import NoRopeConfig
from forge_model.decoder.block_config import ResidualBlockConfig
from forge_model.decoder.config import LayerOverride
from forge_model.decoder.mtp_config import MTPConfig
from forge_model.ffn.config import GeGLUConfig, MLPConfig, SwiGLUConfig
from forge_model.norm_config import LayerNormConfig, RMSNormConfig
from forge_parallel import (
    ParallelConfig,
)
from forge_parallel.capabilities import splits_backward
from forge_parallel.compile_config import CompileConfig
from forge_parallel.config import (
    PIPELINES,
    ActivationCheckpointingConfig,
    ContextParallelConfig,
    FSDPConfig,
    PipelineConfig,
    TensorParallelConfig,
)
from forge_parallel.error import ParallelError
from forge_parallel.testing import run_ranks
from msgspec.structs import replace
from parity import TOKENS, VOCAB, trained

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
    "pp4": (4, {"pp": 4}),
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
UNLIKE = GroupedQueryConfig(
    num_heads=4, num_kv_heads=2, qk_norm=True, qk_norm_over="projection", scale=0.5, softcap=1.5, sinks=True
)
UNLIKE_LAST = GroupedQueryConfig(num_heads=4, num_kv_heads=4, qk_norm=True, softcap=2.0, sliding_window=5)
FEW = GroupedQueryConfig(num_heads=4, num_kv_heads=2, bias=True, qk_norm=True, softcap=1.5)
ONE = GroupedQueryConfig(num_heads=4, num_kv_heads=1, qk_norm=True, qk_norm_over="projection")
SINKS = GroupedQueryConfig(num_heads=4, num_kv_heads=2, sinks=True)
LATENT = LatentConfig(num_heads=4, kv_rank=10, q_rank=14, nope_dim=6, rope_dim=8, value_dim=4, bias=True)
MODELS = {
    "plain": DecoderConfig(**PARTS, attention=HEADS),
    "biased": DecoderConfig(**PARTS, attention=BIASED, ffn=SwiGLUConfig(bias=True)),
    "tied": DecoderConfig(**PARTS, attention=HEADS, tie_embeddings=True),
    "windowed": DecoderConfig(**PARTS, attention=WINDOWED),
    "deep": DecoderConfig(**PARTS | {"num_layers": 5}, attention=WINDOWED),
    "layernorm": DecoderConfig(**PARTS, attention=HEADS, norm=LayerNormConfig(bias=True), ffn=MLPConfig()),
    "latent": DecoderConfig(**PARTS, attention=LATENT),
    "capped": DecoderConfig(
        **PARTS,
        attention=UNLIKE,
        ffn=GeGLUConfig(),
        norm_order="sandwich",
        embedding_scale=3.0,
        logit_softcap=2.0,
        overrides=[LayerOverride(layers="-1", attention=UNLIKE_LAST, norm=RMSNormConfig(zero_centered=True))],
    ),
    "parallel": DecoderConfig(
        **PARTS,
        attention=GroupedQueryConfig(num_heads=4, num_kv_heads=2, rope_dim=4, rope_pairs=True),
        norm=LayerNormConfig(bias=True),
        ffn=MLPConfig(bias=True),
        block=ResidualBlockConfig(parallel=True, scale=1.3),
        logit_divisor=0.6,
    ),
    "learned": DecoderConfig(
        **PARTS,
        # no bias of keys: without rotations no score depends on it, and its gradient is rounding noise
        attention=GroupedQueryConfig(num_heads=4, num_kv_heads=4, output_bias=True),
        norm=LayerNormConfig(bias=True),
        ffn=MLPConfig(bias=True),
        rope=NoRopeConfig(),
        learned_positions=True,
        embedding_scale=1.7,
    ),
    "few heads": DecoderConfig(**PARTS | {"vocab_size": VOCAB + 1}, attention=FEW),
    "one head": DecoderConfig(**PARTS | {"vocab_size": VOCAB + 5}, attention=ONE, tie_embeddings=True),
    "tied deep": DecoderConfig(**PARTS | {"num_layers": 4}, attention=ONE, tie_embeddings=True),
    "sinks": DecoderConfig(
        **PARTS,
        attention=SINKS,
        overrides=[LayerOverride(layers="1::2", attention=replace(SINKS, sliding_window=5))],
    ),
    "ahead": DecoderConfig(**PARTS, attention=LATENT, mtp=MTPConfig(num_modules=2)),
}
FAMILIES = [name for name in MODELS if name not in ("deep", "tied deep", "ahead")]


COUNTS = {"deep": 4, "tied deep": 4}
"""Micro-batches a step, where they are not two."""


@cache
def single(name: str, dtype: str) -> dict[str, list]:
    return run_ranks(trained, 1, {}, MODELS[name], dtype, ParallelConfig(), COUNTS.get(name, 2))[0]


def check(layout: str, name: str, dtype: str, parallel: ParallelConfig, loss: float, norm: float) -> None:
    world_size, sizes = LAYOUTS[layout]
    one = single(name, dtype)
    assert min(one["norm"]) > 0.5, "clipping is active in every step"
    parameters = (sizes, MODELS[name], dtype, parallel, COUNTS.get(name, 2))
    for many in run_ranks(trained, world_size, *parameters, timeout_s=120):
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


SHORT = ("fsdp2", "hsdp2x2", "fsdp2-tp2", "fsdp2-cp2", "pp2-fsdp2", "pp2-tp2", "pp2-cp2")
"""What every run of the tests looks at; the others are slow."""


@pytest.mark.dist
@pytest.mark.parametrize("layout", slow([name for name in LAYOUTS if name != "pp4"], *SHORT))
def test_training_equals_one_process(layout):
    check(layout, "plain", "float32", ParallelConfig(), loss=1e-5, norm=1e-4)


@pytest.mark.dist
@pytest.mark.parametrize("sequence", slow(["sequence", "whole-sequence"], "sequence"))
@pytest.mark.parametrize("name", slow(FAMILIES, "biased", "layernorm", "latent", "capped", "parallel"))
def test_tensor_parallel_training_in_float64_equals_one_process(name, sequence):
    parallel = ParallelConfig(tensor_parallel=TensorParallelConfig(sequence=sequence == "sequence"))
    check("tp2", name, "float64", parallel, loss=1e-10, norm=1e-10)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("tp2", "one head"),
        pytest.param("tp4", "few heads", marks=pytest.mark.slow),
        ("fsdp2-tp2", "one head"),
        pytest.param("tp4", "one head", marks=pytest.mark.slow),
        pytest.param("tp2", "few heads", marks=pytest.mark.slow),
        pytest.param("cp2-tp2", "one head", marks=pytest.mark.slow),
        pytest.param("hsdp2x2-tp2", "one head", marks=pytest.mark.slow),
        pytest.param("pp2-fsdp2-tp2", "few heads", marks=pytest.mark.slow),
    ],
)
def test_ranks_share_heads_and_an_odd_vocabulary_like_one_process(layout, name):
    check(layout, name, "float64", ParallelConfig(), loss=1e-10, norm=1e-9)


@pytest.mark.dist
@pytest.mark.parametrize(
    "layout", slow(["pp2", "pp2-fsdp2", "pp2-tp2", "pp2-replicate2", "pp4", "pp2-cp2"], "pp2-fsdp2")
)
def test_pipeline_with_tied_embeddings_in_float64_equals_one_process(layout):
    """Both ends have the embedding, sum its gradients, and keep the same bits."""
    check(
        layout,
        "tied deep" if layout == "pp4" else "tied",
        "float64",
        ParallelConfig(),
        loss=1e-10,
        norm=1e-10,
    )


@pytest.mark.slow
@pytest.mark.dist
def test_interleaved_pipeline_with_tied_embeddings_and_one_head_of_keys_equals_one_process():
    interleaved = ParallelConfig(pipeline=PipelineConfig(schedule="interleaved_1f1b"))
    check("pp2-tp2", "tied deep", "float64", interleaved, loss=1e-10, norm=1e-10)


@pytest.mark.dist
def test_sharded_training_with_tied_embeddings_in_float64_equals_one_process():
    parallel = ParallelConfig(activation_checkpointing=ActivationCheckpointingConfig(mode="full"))
    check("fsdp2", "tied", "float64", parallel, loss=1e-10, norm=1e-10)


AHEAD = ("fsdp2", "hsdp2x2", "tp2", "cp2-tp2", "pp2-fsdp2", "pp2-cp2", "pp2-fsdp2-tp2")


@pytest.mark.dist
@pytest.mark.parametrize("layout", slow(AHEAD, "tp2", "pp2-fsdp2"))
def test_multi_token_prediction_in_float64_equals_one_process(layout):
    check(layout, "ahead", "float64", ParallelConfig(), loss=1e-10, norm=1e-10)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "parallel"),
    [
        ("tp2", ParallelConfig(tensor_parallel=TensorParallelConfig(sequence=False))),
        ("cp2", ParallelConfig(context_parallel=ContextParallelConfig(method="ulysses"))),
        ("pp2", ParallelConfig(pipeline=PipelineConfig(schedule="gpipe"))),
    ],
)
def test_multi_token_prediction_by_other_means_equals_one_process(layout, parallel):
    check(layout, "ahead", "float64", parallel, loss=1e-10, norm=1e-10)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "parallel"),
    [
        ("pp2-tp2", ParallelConfig()),
        *(
            pytest.param(layout, ParallelConfig(), marks=pytest.mark.slow)
            for layout in ("fsdp2", "hsdp2x2", "fsdp2-tp2", "cp2-tp2", "pp2-cp2", "pp2-fsdp2")
        ),
        pytest.param(
            "cp2-tp2",
            ParallelConfig(
                tensor_parallel=TensorParallelConfig(sequence=False),
                context_parallel=ContextParallelConfig(method="ulysses"),
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "fsdp2-tp2",
            ParallelConfig(compile=CompileConfig(enabled=True, backend="aot_eager")),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_learned_positions_equal_one_process(layout, parallel):
    check(layout, "learned", "float64", parallel, loss=1e-10, norm=1e-10)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "parallel"),
    [
        ("pp2-fsdp2", ParallelConfig()),
        ("fsdp2", ParallelConfig(compile=CompileConfig(enabled=True, backend="aot_eager"))),
    ],
)
def test_parts_of_heads_and_other_residual_connections_equal_one_process(layout, parallel):
    check(layout, "parallel", "float64", parallel, loss=1e-10, norm=1e-10)


@pytest.mark.dist
@pytest.mark.parametrize("schedule", slow(PIPELINES, "interleaved_1f1b", "zbv_zero_bubble"))
def test_pipelined_training_in_float64_equals_one_process(schedule):
    if schedule not in ("gpipe", "1f1b", "interleaved_1f1b") and not splits_backward():
        pytest.skip("needs torch 2.15")
    parallel = ParallelConfig(pipeline=PipelineConfig(schedule=schedule))
    check("pp2", "deep", "float64", parallel, loss=1e-10, norm=1e-10)


@pytest.mark.dist
@pytest.mark.parametrize("method", ["gather", "ulysses"])
@pytest.mark.parametrize("name", slow(FAMILIES, "plain", "windowed", "capped", "latent"))
def test_context_parallel_training_in_float64_equals_one_process(name, method):
    parallel = ParallelConfig(context_parallel=ContextParallelConfig(method=method))
    check("cp2", name, "float64", parallel, loss=1e-10, norm=1e-10)


RING = ParallelConfig(context_parallel=ContextParallelConfig(method="ring"))
RING_LAYOUTS = ("cp2", "cp4", "fsdp2-cp2", "replicate2-cp2", "pp2-cp2", "cp2-tp2", "fsdp2-cp2-tp2")


@pytest.mark.dist
@pytest.mark.parametrize(
    "name", slow([n for n in FAMILIES if n not in ("capped", "few heads")], "windowed", "sinks")
)
def test_attention_by_messages_in_float64_equals_one_process(name):
    check("cp2", name, "float64", RING, loss=1e-10, norm=1e-10)


@pytest.mark.dist
@pytest.mark.parametrize("layout", slow(RING_LAYOUTS, "fsdp2-cp2"))
def test_ten_steps_of_attention_by_messages_equal_one_process(layout):
    check(layout, "plain", "float32", RING, loss=1e-5, norm=1e-4)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "every", "selective", "offload"])
@pytest.mark.parametrize("layout", ["fsdp2-cp2", "pp2-cp2"])
def test_attention_by_messages_is_computed_again(layout, mode):
    again = replace(RING, activation_checkpointing=ActivationCheckpointingConfig(mode=mode))
    check(layout, "windowed", "float64", again, loss=1e-10, norm=1e-10)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp2-tp2", "pp2-cp2"])
@pytest.mark.parametrize("name", ["ahead", "sinks"])
def test_attention_by_messages_under_further_axes_equals_one_process(layout, name):
    check(layout, name, "float64", RING, loss=1e-10, norm=1e-10)


PARTITIONED = CompileConfig(enabled=True, backend="aot_eager_decomp_partition")
FEATURES = {
    **{
        f'activation_checkpointing.mode = "{mode}"': ParallelConfig(
            activation_checkpointing=ActivationCheckpointingConfig(mode=mode)
        )
        for mode in ("full", "every", "selective", "offload")
    },
    "compile.enabled": ParallelConfig(compile=CompileConfig(enabled=True, backend="aot_eager")),
    'activation_checkpointing.mode = "budget"': ParallelConfig(
        activation_checkpointing=ActivationCheckpointingConfig(mode="budget", budget=0.3), compile=PARTITIONED
    ),
    "fsdp.offload": ParallelConfig(fsdp=FSDPConfig(offload=True)),
    "fsdp.prefetch": ParallelConfig(fsdp=FSDPConfig(prefetch=1)),
    'fsdp.reduce_gradients = "every_micro_batch"': ParallelConfig(
        fsdp=FSDPConfig(reduce_gradients="every_micro_batch")
    ),
    'fsdp.reshard = "after_step"': ParallelConfig(fsdp=FSDPConfig(reshard="after_step")),
}
COMBINED = ("fsdp2-tp2", "hsdp2x2", "fsdp2-cp2", "pp2-fsdp2")
REFUSED = [('fsdp.reduce_gradients = "every_micro_batch"', "pp2-fsdp2")]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("feature", "layout"),
    [
        pytest.param(feature, layout, id=f"{feature}-{layout}")
        for feature in FEATURES
        for layout in COMBINED
        if (feature, layout) not in REFUSED
    ],
)
def test_feature_under_a_layout_in_float64_equals_one_process(feature, layout):
    check(layout, "plain", "float64", FEATURES[feature], loss=1e-10, norm=1e-10)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "cp2", "cp2-tp2"])
@pytest.mark.parametrize("sequence", ["sequence", "whole-sequence"])
@pytest.mark.parametrize("name", ["windowed", "latent"])
def test_compiler_chooses_what_to_keep_of_ranks_that_share_matrices(layout, sequence, name):
    parallel = ParallelConfig(
        activation_checkpointing=ActivationCheckpointingConfig(mode="budget", budget=0.3),
        compile=PARTITIONED,
        tensor_parallel=TensorParallelConfig(sequence=sequence == "sequence"),
        context_parallel=ContextParallelConfig(method="ulysses"),
    )
    check(layout, name, "float64", parallel, loss=1e-10, norm=1e-10)


@pytest.mark.parametrize(("feature", "layout"), REFUSED)
def test_feature_that_a_layout_cannot_have_is_refused(feature, layout):
    with pytest.raises(ParallelError, match=r"every_micro_batch.*use .* or mesh.pp = 1"):
        FEATURES[feature].require_pipeline(LAYOUTS[layout][1]["pp"], 0, 1, 1)
