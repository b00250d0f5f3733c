"""A Hugging Face Llama, which knows nothing of Forge, made parallel by the same call with a small plan."""

import pytest
import torch
from forge_parallel.apply import load_full, materialize, parallelize
from forge_parallel.compile_config import CompileConfig
from forge_parallel.config import (
    ActivationCheckpointingConfig,
    MeshConfig,
    ParallelConfig,
    PipelineConfig,
    TensorParallelConfig,
)
from forge_parallel.env import Env
from forge_parallel.error import ParallelError
from forge_parallel.grads import clip_, global_norm
from forge_parallel.mesh import Mesh, build_mesh
from forge_parallel.plan import Plan
from forge_parallel.runner import build_runner
from forge_parallel.stages import keep_stage, stages_of
from forge_parallel.testing import assert_matches_single

pytest.importorskip("transformers")
pytestmark = pytest.mark.dist

PLAN = {
    "blocks": "model.layers.*",
    "units": [["model.embed_tokens"], ["model.norm", "lm_head"]],
    "attention": "model.layers.*.self_attn",
    "tensor": {
        "model.embed_tokens": "embed",
        "model.layers.*.self_attn": "gather",
        "model.layers.*.self_attn.[qkv]_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp": "gather",
        "model.layers.*.mlp.[gu]*_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "model.layers.*.*_layernorm": "norm",
        "model.norm": "norm",
        "lm_head": "head",
    },
    "sequence_inputs": ["input_ids"],
    "stages": {
        "first": ["model.embed_tokens"],
        "last": ["model.norm", "lm_head"],
        "hidden": "inputs_embeds",
        "instead_of": ["input_ids"],
        "dim": 32,
        "pass_through": True,
    },
}
TIED_PLAN = {**PLAN, "units": []}
VOCABULARY, GLOBAL_BATCH, TOKENS, STEPS, CLIP = 62, 8, 12, 10, 0.5


def llama(tied: bool):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
        )
    )


def curves(sizes: dict, options: dict, tied: bool) -> dict[str, list[float]]:
    """Ten clipped AdamW steps over two micro-batches each; one rank computes in the model as it came."""
    env = Env.detect()
    torch.manual_seed(0)
    model = llama(tied)
    mesh, parts = Mesh(torch.device("cpu")), [model]
    if env.world_size > 1:
        weights = {name: t.clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}
        mesh = build_mesh(MeshConfig(**sizes), env)
        plan, config = Plan.of(TIED_PLAN if tied else PLAN), ParallelConfig(**options)
        stages = stages_of(mesh.pipeline.rank, mesh.pipeline.size, config.pipeline)
        parts = [part_of(tied, stage, mesh, plan, config, weights) for stage in stages]
    runner = build_runner(parts, mesh, Plan.of(PLAN))
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    found = {"loss": [], "grad_norm": []}
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH, TOKENS + 1), generator=generator)
        mine = torch.arange(GLOBAL_BATCH).chunk(mesh.batch.size)[mesh.batch.rank]
        total = torch.zeros(())
        targets = (tokens[rows, 1:].flatten() for rows in mine.chunk(2))

        def finish(out, targets=targets, total=total):
            logits = out[0].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, next(targets), reduction="sum")
            total += loss.detach() / (GLOBAL_BATCH * TOKENS)
            return loss / (GLOBAL_BATCH * TOKENS)

        given = {"use_cache": False, "return_dict": False}
        runner.backward([{"input_ids": tokens[rows, :-1], **given} for rows in mine.chunk(2)], finish)
        norm = global_norm(parameters, mesh)
        clip_(parameters, CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()
        found["loss"].append(mesh.pipeline.sum_(mesh.loss.sum_(total)).item())
        found["grad_norm"].append(norm.item())
    return found


def part_of(tied, stage, mesh, plan, config, weights) -> torch.nn.Module:
    """One stage of the model, or all of it."""
    with torch.device("meta"):
        part = llama(tied)
    keep_stage(part, plan, stage, mesh.pipeline.size, config.pipeline)
    parallelize(part, mesh, plan, config)
    materialize(part, torch.device("cpu"))
    own = {name for name, _ in [*part.named_parameters(remove_duplicate=False), *part.named_buffers()]}
    load_full(part, {name: tensor for name, tensor in weights.items() if name in own})
    return part


EXACT = {"loss": 1e-5, "grad_norm": 1e-4}


@pytest.mark.parametrize(
    ("world_size", "sizes", "tied"),
    [
        pytest.param(2, {}, False, marks=pytest.mark.slow),
        (2, {}, True),
        pytest.param(4, {"dp_replicate": 2}, False, marks=pytest.mark.slow),
    ],
    ids=["fsdp-2", "fsdp-2-tied", "hsdp-2x2"],
)
def test_hf_llama_trains_like_one_process(world_size, sizes, tied):
    assert_matches_single(curves, world_size, sizes, {}, tied, rtol=EXACT)


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [pytest.param(ranks, {"pp": 2, "tp": 2}, marks=pytest.mark.slow) for ranks in (4, 8)],
    ids=["pp-2-tp-2", "pp-2-fsdp-2-tp-2"],
)
def test_hf_llama_in_a_pipeline_with_tensor_parallelism_trains_like_one_process(world_size, sizes):
    options = {
        "tensor_parallel": TensorParallelConfig(sequence=False),
        "pipeline": PipelineConfig(schedule="gpipe"),
    }
    assert_matches_single(curves, world_size, sizes, options, False, rtol=EXACT)


@pytest.mark.slow
def test_hf_llama_checkpointed_and_compiled_trains_like_one_process():
    options = {
        "activation_checkpointing": ActivationCheckpointingConfig(mode="full"),
        "compile": CompileConfig(enabled=True, backend="aot_eager"),
    }
    assert_matches_single(curves, 2, {}, options, False, rtol=EXACT)


def test_hf_llama_with_tied_embeddings_refuses_to_cut_them_apart():
    with torch.device("meta"):
        model = llama(tied=True)
    with pytest.raises(ParallelError, match=r"embed_tokens\.weight .*lm_head\.weight"):
        parallelize(model, Mesh(torch.device("cpu")), Plan.of(PLAN))
