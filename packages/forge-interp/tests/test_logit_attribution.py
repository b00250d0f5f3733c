"""Shares of logits sum to the model's own, and are those that weights give, on families with odd ends."""

import pytest
import torch
from forge_interp import InterpError, capture
from forge_interp.circuits.logits import attribute_logits
from forge_interp.sae import SAEConfig, SparseAutoencoder
from torch import nn

transformers = pytest.importorskip("transformers")

VOCAB = 50
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
GQA = {"num_key_value_heads": 2}
FAMILIES = {
    "llama": ("Llama", SMALL | GQA),
    "llama tied": ("Llama", SMALL | GQA | {"tie_word_embeddings": True, "attention_bias": True}),
    "gpt2 (layer norm)": (
        "GPT2",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gemma2 (soft caps, norms behind)": (
        "Gemma2",
        SMALL | GQA | {"head_dim": 8, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    ),
    "granite (scaled)": (
        "Granite",
        SMALL | GQA | {"logits_scaling": 3.0, "residual_multiplier": 0.3, "embedding_multiplier": 5.0},
    ),
    "gpt-neox (parallel)": ("GPTNeoX", SMALL | {"use_parallel_residual": True}),
    "phi (parallel, head bias)": ("Phi", SMALL),
    "olmo2 (norms behind only)": ("Olmo2", SMALL | GQA),
    "cohere (scaled, parallel, no norm bias)": ("Cohere", SMALL | GQA | {"logit_scale": 0.25}),
    "qwen3": ("Qwen3", SMALL | GQA | {"head_dim": 8}),
}


def build(name: str) -> nn.Module:
    family, options = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options)
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model


@pytest.fixture
def tokens():
    torch.manual_seed(1)
    return torch.randint(3, VOCAB, (2, 7))


@pytest.mark.parametrize("final_norm", ["frozen_norm", "linearized_norm"])
@pytest.mark.parametrize("name", FAMILIES)
def test_shares_sum_to_the_logits_of_the_model(name, final_norm, tokens):
    model = build(name)
    targets, against = tokens.roll(-1, 1), tokens.roll(2, 1)
    with torch.no_grad():
        logits = model(tokens).logits.double()
    found = attribute_logits(model, tokens, targets, against=against, final_norm=final_norm)
    wanted = logits.gather(-1, targets[..., None])[..., 0] - logits.gather(-1, against[..., None])[..., 0]
    torch.testing.assert_close(found.logits, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sum(found.parts.values()), wanted, rtol=1e-5, atol=1e-5)
    for block in ("blocks.0", "blocks.1"):
        inner = found.heads[block].sum(-1) + found.neurons[block].sum(-1) + found.rest[block]
        torch.testing.assert_close(inner, found.parts[block], rtol=1e-5, atol=1e-5)
        assert found.heads[block].shape == (2, 7, 4) and found.heads[block].abs().max() > 1e-3
        has_bias = any(word in name for word in ("gpt", "phi", "tied"))
        assert has_bias or found.rest[block].abs().max() < 1e-5  # heads and neurons are all that there is
        is_parallel = "parallel" in name or "granite" in name  # of Granite, resid_mid is not found
        assert (block in found.attention) != is_parallel
        if not is_parallel and not has_bias:
            torch.testing.assert_close(
                found.attention[block], found.heads[block].sum(-1), rtol=1e-5, atol=1e-5
            )
            torch.testing.assert_close(found.mlp[block], found.neurons[block].sum(-1), rtol=1e-5, atol=1e-5)
    assert found.parts["between"].abs().max() < 1e-5


def test_shares_of_heads_and_neurons_are_those_of_the_weights(tokens):
    model, targets = build("llama"), tokens.roll(-1, 1)
    found = attribute_logits(model, tokens, targets)
    sites = ["model.layers.1.self_attn:attn.z", "model.layers.1.mlp.down_proj:in", "model.norm:in"]
    with torch.no_grad(), capture(model, sites) as acts:
        model(tokens)
    z, neurons, last = (acts[site].double() for site in sites)
    scale = (last.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()
    row = model.lm_head.weight[targets].double()
    direction = row * model.model.norm.weight.double() / scale
    torch.testing.assert_close(found.direction, direction, rtol=1e-4, atol=1e-5)
    out = model.model.layers[1].self_attn.o_proj.weight.double()
    for head in range(4):
        written = z[:, head] @ out[:, head * 8 : (head + 1) * 8].T
        torch.testing.assert_close(
            found.heads["blocks.1"][..., head], (written * direction).sum(-1), rtol=1e-4, atol=1e-5
        )
    down = model.model.layers[1].mlp.down_proj.weight.double()
    torch.testing.assert_close(found.neurons["blocks.1"], neurons * (direction @ down), rtol=1e-4, atol=1e-5)


def test_shares_of_features_and_the_rest_sum_to_the_stream(tokens):
    model = build("llama")
    found = attribute_logits(model, tokens, tokens)
    sae = SparseAutoencoder(SAEConfig(32, 40, "topk", k=4, rescale_acts_by_decoder_norm=True))
    with torch.no_grad(), capture(model, "model.layers.0") as acts:
        model(tokens)
    value = acts["model.layers.0"]
    features, rest = found.of_features(sae, value)
    acts, rows = sae.encode(value).detach(), sae.W_dec.detach()
    wanted = torch.stack(
        [acts[..., i] / rows[i].norm() * (found.direction @ rows[i].double()) for i in range(40)], -1
    )
    torch.testing.assert_close(features.detach(), wanted, rtol=1e-5, atol=1e-6)
    stream = found.parts["embed"] + found.parts["blocks.0"]
    torch.testing.assert_close((features.sum(-1) + rest).detach(), stream, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2 (soft caps, norms behind)"])
def test_in_16_bits_heads_and_neurons_are_those_of_32(name, tokens):
    exact, found = (
        attribute_logits(build(name).to(dtype), tokens, tokens) for dtype in (torch.float32, torch.bfloat16)
    )
    for of in ("heads", "neurons"):
        for block, shares in getattr(exact, of).items():
            alike = torch.cosine_similarity(shares.flatten(), getattr(found, of)[block].flatten(), 0)
            assert alike > 0.99


def test_what_cannot_be_attributed_is_refused(tokens):
    model = build("llama")
    with pytest.raises(InterpError, match=r"targets are \[7\]; expected \[2, 7\]"):
        attribute_logits(model, tokens, tokens[0])
    with pytest.raises(InterpError, match="order of the model's logits"):
        attribute_logits(model, tokens, tokens, head=nn.Linear(32, VOCAB))
    model.model.norm.forward = lambda x: x.tanh()
    with pytest.raises(InterpError, match="neither RMS nor layer norm"):
        attribute_logits(model, tokens, tokens)
    assert attribute_logits(model, tokens, tokens, final_norm="linearized_norm").logits.shape == (2, 7)


def test_heads_in_front_of_the_norm_of_a_sum_have_no_share(tokens):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    model = transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(**sizes)).eval()
    found = attribute_logits(model, tokens, tokens, final_norm="linearized_norm", norm=nn.Identity())
    logits = model(tokens).logits.gather(-1, tokens[..., None])[..., 0].double()
    torch.testing.assert_close(sum(found.parts.values()), logits, rtol=1e-5, atol=1e-5)
    assert not (found.heads or found.neurons or found.attention or found.mlp)
