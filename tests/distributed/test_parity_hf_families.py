"""Models of Hugging Face as they come, made parallel by a plan alone: TP x FSDP x PP against one process."""

from typing import Any

import pytest
import torch
from forge_parallel.apply import load_full, materialize, parallelize
from forge_parallel.config import MeshConfig, ParallelConfig, PipelineConfig, TensorParallelConfig
from forge_parallel.env import Env
from forge_parallel.grads import global_norm
from forge_parallel.mesh import Mesh, build_mesh
from forge_parallel.plan import Plan
from forge_parallel.runner import build_runner
from forge_parallel.stages import keep_stage, stages_of
from forge_parallel.testing import assert_matches_single
from torch import nn

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.dist

VOCABULARY, BATCH, TOKENS, STEPS, DIM, HEADS = 63, 8, 12, 3, 32, 4
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": DIM,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}


def plan(
    embed: str,
    layers: str,
    norm: str,
    head: str,
    tensor: dict[str, str],
    zero: tuple[str, ...] = (),
    tuples: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """The plan of a decoder: `tensor` and the values of `more` name modules of a layer."""
    inside = {f"{layers}.*.{name}": role for name, role in tensor.items()}
    roles = {embed: "embed", **dict.fromkeys(zero, "unsharded"), **inside, norm: "norm", head: "head"}
    return {
        "blocks": f"{layers}.*",
        "units": [[embed, *zero], [norm, head]],
        "tensor": roles,
        "sequence_inputs": ["input_ids"],
        "stages": {
            "first": [embed, *zero],
            "last": [norm, head],
            "hidden": "inputs_embeds",
            "instead_of": ["input_ids"],
            "dim": DIM,
            "pass_through": True,
            "zero": list(zero),
            "blocks_return_tuples": tuples,
        },
        **{key: {f"{layers}.*.{name}": value for name, value in said.items()} for key, said in more.items()},
    }


def llama_like(tensor: dict[str, str], **more: Any) -> dict[str, Any]:
    return plan("model.embed_tokens", "model.layers", "model.norm", "lm_head", tensor, **more)


ATTENTION = {"self_attn": "gather", "self_attn.[qkv]_proj": "colwise", "self_attn.o_proj": "rowwise"}
NORMS = {"*_layernorm": "norm"}
GATED = {"mlp": "gather", "mlp.[gu]*_proj": "colwise", "mlp.down_proj": "rowwise"}
FUSED_GATE = {"mlp": "gather", "mlp.gate_up_proj": "colwise", "mlp.down_proj": "rowwise"}
LLAMA = ATTENTION | GATED | NORMS
SHARED = {"output_units": {"self_attn.[kv]_proj": [1]}}
GROUPED = {"num_key_value_heads": 2}
FALCON = {
    "self_attention": "gather",
    "self_attention.query_key_value": "colwise",
    "self_attention.dense": "rowwise",
    "mlp": "gather",
    "mlp.dense_h_to_4h": "colwise",
    "mlp.dense_4h_to_h": "rowwise",
    "input_layernorm": "norm",
}
NEOX = {
    "attention": "gather",
    "attention.query_key_value": "colwise",
    "attention.dense": "rowwise",
    "mlp": "gather",
    "mlp.dense_h_to_4h": "colwise",
    "mlp.dense_4h_to_h": "rowwise",
    "*_layernorm": "norm",
}
OPT = {
    "self_attn": "gather",
    "self_attn.[qkv]_proj": "colwise",
    "self_attn.out_proj": "rowwise",
    "fc1": "gather_colwise",
    "fc2": "rowwise",
    "self_attn_layer_norm": "norm",
    "final_layer_norm": "norm",
}
PHI = {
    "self_attn": "gather",
    "self_attn.[qkv]_proj": "colwise",
    "self_attn.dense": "rowwise",
    "mlp": "gather",
    "mlp.fc1": "colwise",
    "mlp.fc2": "rowwise",
    "input_layernorm": "norm",
}
WIDE = {"mlp": "gather", "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", GROUPED, llama_like(LLAMA)),
    "llama-one-key-head": ("Llama", {"num_key_value_heads": 1}, llama_like(LLAMA, **SHARED)),
    "mistral": ("Mistral", GROUPED, llama_like(LLAMA)),
    "qwen2": ("Qwen2", GROUPED, llama_like(LLAMA)),
    "qwen3": (
        "Qwen3",
        GROUPED | {"head_dim": 8},
        llama_like(LLAMA | {"self_attn.[qk]_norm": "head_norm"}),
    ),
    "granite": ("Granite", GROUPED | {"residual_multiplier": 0.5}, llama_like(LLAMA)),
    "smollm3": ("SmolLM3", GROUPED, llama_like(LLAMA)),
    "stablelm": (
        "StableLm",
        GROUPED,
        llama_like(LLAMA, counts={"self_attn": ["num_heads", "num_key_value_heads", "hidden_size"]}),
    ),
    "starcoder2": (
        "Starcoder2",
        GROUPED | {"residual_dropout": 0.0, "embedding_dropout": 0.0},
        llama_like(ATTENTION | WIDE | NORMS),
    ),
    "glm4": (
        "Glm4",
        GROUPED | {"head_dim": 8},
        llama_like(ATTENTION | FUSED_GATE | NORMS, output_units={"mlp.gate_up_proj": [48, 48]}),
    ),
    "phi3": (
        "Phi3",
        GROUPED | STILL,
        llama_like(
            {"self_attn": "gather", "self_attn.qkv_proj": "colwise", "self_attn.o_proj": "rowwise"}
            | FUSED_GATE
            | NORMS,
            output_units={"self_attn.qkv_proj": [HEADS, 2, 2], "mlp.gate_up_proj": [48, 48]},
            counts={"self_attn": ["config.num_attention_heads", "num_key_value_heads"]},
        ),
    ),
    "phi": (
        "Phi",
        STILL,
        plan("model.embed_tokens", "model.layers", "model.final_layernorm", "lm_head", PHI),
    ),
    "gpt-neox": (
        "GPTNeoX",
        {"attention_dropout": 0.0, "hidden_dropout": 0.0},
        plan("gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm", "lm_head", NEOX),
    ),
    "falcon": (
        "Falcon",
        {"multi_query": True, "new_decoder_architecture": False, "parallel_attn": True},
        plan(
            "transformer.word_embeddings",
            "transformer.h",
            "transformer.ln_f",
            "lm_head",
            FALCON,
            tuples=True,
            output_units={"self_attention.query_key_value": [HEADS, 1, 1]},
            counts={"self_attention": ["num_heads"]},
        ),
    ),
    "opt": (
        "OPT",
        {"ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": DIM},
        plan(
            "model.decoder.embed_tokens",
            "model.decoder.layers",
            "model.decoder.final_layer_norm",
            "lm_head",
            OPT,
            zero=("model.decoder.embed_positions",),
            counts={"self_attn": ["num_heads"]},
        ),
    ),
}


def build(family: str) -> nn.Module:
    name, sizes, _ = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SIZES | sizes)
    return getattr(transformers, f"{name}ForCausalLM")(config).double()


def curves(sizes: dict[str, int], family: str) -> dict[str, list[float]]:
    """Steps over two micro-batches each in float64; one rank computes in the model as it came."""
    env = Env.detect()
    torch.manual_seed(0)
    whole = build(family)
    with torch.no_grad():
        for parameter in whole.parameters():  # zeros and ones would hide what is mixed up
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    plan = Plan.of(FAMILIES[family][2])
    mesh, parts = Mesh(torch.device("cpu")), [whole]
    if env.world_size > 1:
        mesh = build_mesh(MeshConfig(**sizes), env)
        config = ParallelConfig(
            tensor_parallel=TensorParallelConfig(sequence=False), pipeline=PipelineConfig(schedule="gpipe")
        )
        stages = stages_of(mesh.pipeline.rank, mesh.pipeline.size, config.pipeline)
        parts = [part_of(family, whole, stage, mesh, plan, config) for stage in stages]
    runner = build_runner(parts, mesh, plan)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    generator = torch.Generator().manual_seed(1)
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=generator)
        mine = torch.arange(BATCH).chunk(mesh.batch.size)[mesh.batch.rank].chunk(2)
        total, targets = torch.zeros((), dtype=torch.float64), iter(mine)

        def finish(out: Any, tokens=tokens, targets=targets, total=total) -> torch.Tensor:
            labels = tokens[next(targets), 1:].flatten()
            loss = nn.functional.cross_entropy(out[0].flatten(0, 1), labels, reduction="sum")
            total += loss.detach() / (BATCH * TOKENS)
            return loss / (BATCH * TOKENS)

        given = {"use_cache": False, "return_dict": False}
        runner.backward([{"input_ids": tokens[rows, :-1], **given} for rows in mine], finish)
        found["grad_norm"].append(global_norm(parameters, mesh).item())
        optimizer.step()
        optimizer.zero_grad()
        found["loss"].append(mesh.pipeline.sum_(mesh.loss.sum_(total)).item())
    return found


def part_of(
    family: str, whole: nn.Module, stage: int, mesh: Mesh, plan: Plan, config: ParallelConfig
) -> nn.Module:
    """One stage of the model, or all of it."""
    weights = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    with torch.device("meta"):
        part = build(family)
    keep_stage(part, plan, stage, mesh.pipeline.size, config.pipeline)
    parallelize(part, mesh, plan, config)
    materialize(part, torch.device("cpu"))
    own = {name for name, _ in [*part.named_parameters(), *part.named_buffers()]}
    load_full(part, {name: tensor.clone() for name, tensor in weights.items() if name in own})
    return part


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_model_of_hugging_face_in_a_pipeline_with_tensor_parallelism_trains_like_one_process(family):
    assert_matches_single(curves, 4, {"pp": 2, "tp": 2}, family, rtol={"loss": 1e-10, "grad_norm": 1e-9})


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_model_of_hugging_face_on_all_axes_trains_like_one_process(family):
    assert_matches_single(curves, 8, {"pp": 2, "tp": 2}, family, rtol={"loss": 1e-10, "grad_norm": 1e-9})
