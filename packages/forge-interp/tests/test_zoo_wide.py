"""Forty decoders and encoders of transformers that nothing in the package knows by name.

In and out of every block are those of plain hooks, bit for bit; attention is within 1e-5 of P V = z and of
the weights that the eager model returns, or an error whose remedy works; a head edit in `generate()` is
exact; extraction has the rows of its samples.
"""

from functools import partial

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers
from forge_interp import ActivationStore, InterpError, ablate, capture, edit, extract_representations

from .zoo import ENCODER, GROUPED, SPECIAL, VOCAB, build, text, value_of

pytestmark = pytest.mark.slow
GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | SPECIAL
ROTARY = GPT | {"rotary_dim": 4}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4} | SPECIAL
OPT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 48,
}
OPT |= {"max_position_embeddings": 64, "word_embed_proj_dim": 32} | SPECIAL
NEO = {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4} | SPECIAL
NEO |= {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64}
MPT = {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}
XGLM = {"vocab_size": VOCAB, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48} | SPECIAL
MOE = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SINKS = MOE | {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4}
SINKS |= {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
BIRD = ENCODER | {"attention_type": "original_full"} | SPECIAL
DISTIL = {"vocab_size": VOCAB, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
DECODERS = {
    "Llama": GROUPED, "Mistral": GROUPED, "Qwen2": GROUPED, "Qwen3": GROUPED, "Phi": GROUPED,
    "Phi3": GROUPED, "StableLm": GROUPED, "Starcoder2": GROUPED, "Olmo": GROUPED, "Olmo2": GROUPED,
    "Cohere": GROUPED, "Cohere2": GROUPED, "Gemma": GROUPED | {"head_dim": 8},
    "Gemma2": GROUPED | {"head_dim": 8, "sliding_window": 4}, "Granite": GROUPED,
    "Glm": GROUPED | {"head_dim": 8},
    "Glm4": GROUPED | {"head_dim": 8}, "Helium": GROUPED | {"head_dim": 8}, "Nemotron": GROUPED,
    "SmolLM3": GROUPED, "Mixtral": GROUPED | {"num_local_experts": 4}, "Qwen2Moe": MOE, "Qwen3Moe": MOE,
    "Olmoe": MOE, "GPTNeoX": ENCODER | SPECIAL, "GPT2": GPT, "GPTBigCode": GPT, "GPTJ": ROTARY,
    "CodeGen": ROTARY, "GPTNeo": NEO, "Bloom": BLOOM, "Mpt": MPT, "OPT": OPT, "XGLM": XGLM,
    "BioGpt": ENCODER | SPECIAL, "Falcon": ENCODER | SPECIAL | {"multi_query": True}, "GptOss": SINKS,
}  # fmt: skip
ENCODERS = {
    "Bert": ENCODER, "Roberta": ENCODER | SPECIAL, "Electra": ENCODER | {"embedding_size": 32},
    "DistilBert": DISTIL, "ModernBert": ENCODER | SPECIAL | {"cls_token_id": 1, "sep_token_id": 2},
    "DebertaV2": ENCODER, "MPNet": ENCODER | SPECIAL, "BigBird": BIRD, "XLMRoberta": ENCODER | SPECIAL,
    "Camembert": ENCODER | SPECIAL,
}  # fmt: skip
ALL = list(DECODERS | ENCODERS)
assert len(ALL) >= 40


def made(name, attention="sdpa"):
    kind = f"{name}ForCausalLM" if name in DECODERS else f"{name}Model"
    kind = {"GPT2ForCausalLM": "GPT2LMHeadModel"}.get(kind, kind)
    config = getattr(transformers, f"{name}Config")(**(DECODERS | ENCODERS)[name])
    try:
        return build(kind, config, attention)
    except ValueError:
        return build(kind, config, "eager")  # what families without SDPA say


def blocks(model):
    """The longest list of modules that run: its members' names."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    name = next(name for name in lists if len(model.get_submodule(name)) == 2)
    return [f"{name}.0", f"{name}.1"]


@pytest.mark.parametrize("name", ALL)
def test_blocks_are_those_of_plain_hooks(name):
    model, seen = made(name), {}
    names = blocks(model)

    def hook(block, module, args, kwargs, output):
        given = args[0] if args else next(v for v in kwargs.values() if isinstance(v, torch.Tensor))
        seen[f"{block}:in"], seen[f"{block}:out"] = given.clone(), value_of(output).clone()

    handles = [
        model.get_submodule(block).register_forward_hook(partial(hook, block), with_kwargs=True)
        for block in names
    ]
    with torch.no_grad(), capture(model, [f"{b}:{part}" for b in names for part in ("in", "out")]) as acts:
        model(**text(True))
    for handle in handles:
        handle.remove()
    assert set(acts) == set(seen) and all(acts[site].equal(seen[site]) for site in seen)


@pytest.mark.parametrize("name", ALL)
def test_attention_is_that_of_the_eager_model(name):
    model, eager, inputs = made(name), made(name, "eager"), text(False)
    sites = [f"{block}.**:attn.{part}" for block in blocks(model) for part in ("pattern", "v", "z")]
    with torch.no_grad():
        with capture(model, sites) as acts:
            model(**inputs)
        weights = eager(**inputs, output_attentions=True).attentions
    found = [key for key in acts if key.endswith("attn.pattern")]
    assert len(found) == len(weights) == 2
    for key, expected in zip(found, weights, strict=True):
        pattern, v, z = (acts[key.replace("pattern", part)] for part in ("pattern", "v", "z"))
        torch.testing.assert_close(pattern, expected.float(), rtol=0, atol=1e-5)
        torch.testing.assert_close(
            pattern @ v.repeat_interleave(z.shape[1] // v.shape[1], 1), z, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", DECODERS)
def test_a_head_without_its_output_is_the_same_head_in_all_of_generate(name, beams):
    """The last head's channels before the output projection, set to zero by a plain hook."""
    model, inputs = made(name), text(True)
    with torch.no_grad(), capture(model, [f"{block}.**:attn.z" for block in blocks(model)]) as acts:
        model(**inputs)
    sites = list(acts)
    heads, width = acts[sites[0]].shape[1], acts[sites[0]].shape[1] * acts[sites[0]].shape[3]

    def remove(module, args):
        z = args[0].clone()
        z[..., width - width // heads :] = 0
        return (z, *args[1:])

    def generated():
        options = {
            "max_new_tokens": 4,
            "output_scores": True,
            "return_dict_in_generate": True,
            "num_beams": beams,
        }
        with torch.no_grad():
            found = model.generate(**inputs, **options, do_sample=False, pad_token_id=0)
        return found.sequences, torch.stack(found.scores)

    handles = []
    for site in sites:
        attention = model.get_submodule(site.partition(":")[0])
        ends = ("o_proj", "out_proj", "dense", "c_proj", "out", "dense_4h")
        projection = [m for n, m in attention.named_modules() if n.split(".")[-1] in ends]
        handles.append(projection[-1].register_forward_pre_hook(remove))
    expected = generated()
    for handle in handles:
        handle.remove()
    plain = generated()
    with edit(model, {site: ablate("zero", (slice(None), heads - 1)) for site in sites}):
        tokens, scores = generated()
    assert tokens.equal(expected[0]) and not scores.equal(plain[1])
    finite = expected[1].isfinite()
    torch.testing.assert_close(scores[finite], expected[1][finite], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_extraction_has_the_rows_of_its_samples(name, tmp_path):
    model, site = made(name), blocks(made(name))[1]
    tokens = torch.randint(3, VOCAB - 1, (5, 7), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "attention_mask": torch.ones(7, dtype=torch.long)} for row in tokens]
    extract_representations(model, data, [site], tmp_path / "acts", batch_size=2, progress=False)
    with torch.no_grad(), capture(model, site) as acts:
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    store = ActivationStore.open(tmp_path / "acts")
    assert store.sample_id.tolist() == [i for i in range(5) for _ in range(7)]
    assert store.token_id.tolist() == tokens.flatten().tolist()
    expected = acts[site].flatten(0, 1)
    torch.testing.assert_close(store.read(f"{site}:out"), expected, rtol=1e-4, atol=1e-4)


def test_an_error_has_a_remedy_that_works():
    """XLNet takes a softmax over [T, S, B, N] and einsum: refused, and its block outputs are there."""
    config = transformers.XLNetConfig(vocab_size=VOCAB, d_model=32, n_layer=2, n_head=4, d_inner=48)
    model = build("XLNetModel", config, "eager")
    with (
        pytest.raises(InterpError, match="set_attn_implementation"),
        capture(model, "layer.*.**:attn.pattern"),
    ):
        model(**text(False))
    with torch.no_grad(), capture(model, "layer.*:out.0") as acts:
        model(**text(False))
    assert len(acts) == 2
