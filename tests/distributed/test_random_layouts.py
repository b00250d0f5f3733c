"""Random layouts of random models: each trains like one process, or is refused before there is a group."""

import random

import pytest
from forge_data.config import DataConfig
from forge_data.sources.config import PythonStdlibConfig
from forge_model import DecoderConfig
from forge_model.attention.config import GroupedQueryConfig
from forge_model.ffn.config import SwiGLUConfig
from forge_parallel import MeshConfig, ParallelConfig
from forge_parallel.config import (
    PIPELINES,
    ActivationCheckpointingConfig,
    ContextParallelConfig,
    PipelineConfig,
    TensorParallelConfig,
)
from forge_parallel.error import ParallelError
from forge_parallel.testing import run_ranks
from forge_trainer.config.checks import axes_compute_the_model, axes_divide_the_model, stages_fit_the_model
from msgspec.structs import replace
from parity import TOKENS, VOCAB, trained

STEPS, RANKS = 3, 4


def drawn(seed: int) -> tuple[dict, DecoderConfig, ParallelConfig, int]:
    """The axes of four ranks, a model, how both go together, and the micro-batches of a rank."""
    draw = random.Random(seed)
    axes = draw.sample(("pp", "dp_replicate", "dp_shard", "cp", "tp"), 2)
    sizes = draw.choice([{axes[0]: 4}, {axes[0]: 2, axes[1]: 2}])
    heads = draw.choice([2, 4, 8])
    attention = GroupedQueryConfig(
        num_heads=heads,
        num_kv_heads=draw.choice([n for n in (1, 2, 4, 8) if heads % n == 0]),
        head_dim=draw.choice([None, 4]),
        bias=draw.random() < 0.3,
        qk_norm=draw.random() < 0.5,
        sliding_window=draw.choice([None, 3, 7]),
    )
    model = DecoderConfig(
        vocab_size=VOCAB,
        dim=32,
        num_layers=draw.randint(1, 9),
        max_tokens=TOKENS,
        tie_embeddings=draw.random() < 0.3,
        attention=attention,
        ffn=SwiGLUConfig(dim=draw.choice([24, 34, 48])),
    )
    parallel = ParallelConfig(
        tensor_parallel=TensorParallelConfig(sequence=draw.random() < 0.7),
        context_parallel=ContextParallelConfig(method=draw.choice(["gather", "ring", "ulysses"])),
        pipeline=PipelineConfig(schedule=draw.choice(list(PIPELINES))),
        activation_checkpointing=ActivationCheckpointingConfig(
            mode=draw.choice(["none", "full", "every", "selective", "offload"])
        ),
    )
    micro_batches = draw.choice([2, 4])
    return sizes, replace(model, vocab_size=VOCAB + draw.choice([0, 1, 7])), parallel, micro_batches


def refused(sizes: dict, model: DecoderConfig, parallel: ParallelConfig, micro_batches: int) -> bool:
    """Whether a job says no when it is loaded."""
    mesh, data = MeshConfig(**sizes), DataConfig(max_tokens=TOKENS, sources=[PythonStdlibConfig()])
    try:
        parallel.pipeline.require_micro_batches(micro_batches, mesh.pp)
        axes_divide_the_model(model, data, mesh, parallel.tensor_parallel, parallel.context_parallel)
        axes_compute_the_model(model, mesh, parallel.tensor_parallel, parallel.context_parallel)
        stages_fit_the_model(
            model,
            mesh,
            parallel.pipeline,
            parallel.compile,
            parallel.activation_checkpointing,
            parallel.fsdp,
            parallel.tensor_parallel,
        )
    except (ValueError, ParallelError):
        return True
    return False


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_random_layout_trains_like_one_process_or_is_refused_before(first):
    compared = 0
    for seed in range(first, first + 10):
        sizes, model, parallel, micro_batches = drawn(seed)
        if refused(sizes, model, parallel, micro_batches):
            continue
        arguments = (model, "float64", parallel, micro_batches, STEPS)
        whole = (model, "float64", ParallelConfig(), 2, STEPS)
        one = run_ranks(trained, 1, {}, *whole)[0]
        for many in run_ranks(trained, RANKS, sizes, *arguments, timeout_s=120):
            assert many["loss"] == pytest.approx(one["loss"], rel=1e-9), (seed, sizes, parallel)
            assert many["norm"] == pytest.approx(one["norm"], rel=1e-9), (seed, sizes, parallel)
            for key, value in one["after"].items():
                assert (many["after"][key] - value).abs().max() <= 1e-9 * value.abs().max(), (seed, key)
        compared += 1
    assert compared, "some of the draws can be trained"
