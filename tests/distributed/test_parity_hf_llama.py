"""A Hugging Face Llama, which knows nothing of Forge, made parallel by the same call with a small plan."""

import pytest
import torch
from forge_parallel.apply import load_full, materialize, parallelize, set_sync
from forge_parallel.config import ActivationCheckpointingConfig, CompileConfig, MeshConfig, ParallelConfig
from forge_parallel.env import Env
from forge_parallel.error import ParallelError
from forge_parallel.grads import clip_, global_norm
from forge_parallel.mesh import Mesh, build_mesh
from forge_parallel.plan import Plan
from forge_parallel.testing import assert_matches_single

pytest.importorskip("transformers")
pytestmark = pytest.mark.dist

PLAN = {
    "blocks": "model.layers.*",
    "units": [["model.embed_tokens"], ["model.norm", "lm_head"]],
    "attention": "model.layers.*.self_attn",
    "tensor": {
        "model.layers.*.self_attn.[qkv]_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    },
}
TIED_PLAN = {**PLAN, "units": []}
VOCABULARY, GLOBAL_BATCH, TOKENS, STEPS, CLIP = 61, 8, 12, 10, 0.5


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
    mesh = Mesh(torch.device("cpu"))
    if env.world_size > 1:
        weights = {name: t.clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}
        mesh = build_mesh(MeshConfig(**sizes), env)
        with torch.device("meta"):
            model = llama(tied)
        parallelize(model, mesh, Plan.of(TIED_PLAN if tied else PLAN), ParallelConfig(**options))
        materialize(model, torch.device("cpu"))
        load_full(model, weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    found = {"loss": [], "grad_norm": []}
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH, TOKENS + 1), generator=generator)
        mine = torch.arange(GLOBAL_BATCH).chunk(mesh.batch.size)[mesh.batch.rank]
        total = torch.zeros(())
        for index, rows in enumerate(mine.chunk(2)):
            set_sync(model, last=index == 1)
            logits = model(input_ids=tokens[rows, :-1], use_cache=False).logits
            targets = tokens[rows, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
            loss = loss / (GLOBAL_BATCH * TOKENS)
            loss.backward()
            total += loss.detach()
        norm = global_norm(model.parameters(), mesh)
        clip_(model.parameters(), CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()
        found["loss"].append(mesh.loss.sum_(total).item())
        found["grad_norm"].append(norm.item())
    return found


EXACT = {"loss": 1e-5, "grad_norm": 1e-4}


@pytest.mark.parametrize(
    ("world_size", "sizes", "tied"),
    [(2, {}, False), (2, {}, True), (4, {"dp_replicate": 2}, False)],
    ids=["fsdp-2", "fsdp-2-tied", "hsdp-2x2"],
)
def test_hf_llama_trains_like_one_process(world_size, sizes, tied):
    assert_matches_single(curves, world_size, sizes, {}, tied, rtol=EXACT)


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
