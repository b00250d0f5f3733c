"""Attention of models that take the softmax themselves, beside the weights that they return."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers")

import transformers
from forge_interp import AttentionSummary, InterpError, ablate, capture, each_attention, edit

from .zoo import GROUPED, SPECIAL, VOCAB, build, text

N = 4
WIDE = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": N} | SPECIAL
GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": N, "n_positions": 64} | SPECIAL
NEO = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": N,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 4,
    "max_position_embeddings": 64,
} | SPECIAL
MPT = {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": N, "max_seq_len": 64}
DEBERTA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": N,
    "intermediate_size": 48,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 8,
}
XGLM = {"vocab_size": VOCAB, "d_model": 32, "num_layers": 2, "attention_heads": N, "ffn_dim": 48} | SPECIAL
EAGER = {
    "Bloom": ("BloomForCausalLM", WIDE, "**.self_attention", "dense"),
    "GPTJ": ("GPTJForCausalLM", GPT | {"rotary_dim": 4}, "**.attn", "out_proj"),
    "GPTNeo": ("GPTNeoForCausalLM", NEO, "**.attn.attention", "out_proj"),
    "CodeGen": ("CodeGenForCausalLM", GPT | {"rotary_dim": 4}, "**.attn", "out_proj"),
    "Mpt": ("MptForCausalLM", MPT, "**.attn", "out_proj"),
    "XGLM": ("XGLMForCausalLM", XGLM, "**.self_attn", "out_proj"),
    "DebertaV2": ("DebertaV2Model", DEBERTA, "**.attention.self", None),
    "Gemma2": ("Gemma2ForCausalLM", GROUPED | {"head_dim": 8, "sliding_window": 4}, "**.self_attn", "o_proj"),
    "Llama": ("LlamaForCausalLM", GROUPED, "**.self_attn", "o_proj"),
}


def made(name):
    model, config, modules, projection = EAGER[name]
    config = getattr(transformers, f"{name}Config")(**config)
    return build(model, config, "eager"), modules, projection


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", EAGER)
def test_patterns_are_the_weights_that_the_model_returns(name, padded):
    model, modules, _ = made(name)
    inputs = text(padded)
    names = ["scores", "pattern", "v", "z", "entropy"]
    summary = AttentionSummary(["sink", "previous"])
    with torch.no_grad(), capture(model, [f"{modules}:attn.{part}" for part in names]) as acts:
        expected = model(**inputs, output_attentions=True).attentions
        with each_attention(model, modules, summary.update):
            model(**inputs)
    found = [acts[key] for key in acts if key.endswith("attn.pattern")]
    assert len(found) == len(expected) == 2 and summary.values("sink").shape == (2, N)
    for key, weights in zip((key for key in acts if key.endswith("attn.pattern")), expected, strict=True):
        torch.testing.assert_close(acts[key], weights, rtol=0, atol=1e-5)
        v, z = (acts[key.replace("pattern", part)] for part in ("v", "z"))
        assert v.shape[1] == (2 if name in ("Gemma2", "Llama") else N)
        torch.testing.assert_close(weights @ v.repeat_interleave(N // v.shape[1], 1), z, rtol=0, atol=1e-5)


@pytest.mark.parametrize("site", ["z", "pattern", "v"])
@pytest.mark.parametrize("name", [name for name, (*_, projection) in EAGER.items() if projection])
def test_edits_of_a_head_equal_its_removal_before_the_projection(name, site):
    model, modules, projection = made(name)
    inputs, grouped = text(False), name in ("Gemma2", "Llama")
    heads = [2, 3] if grouped and site == "v" else [2]

    def remove(module, args):
        z = args[0].unflatten(-1, (N, -1)).clone()
        z[..., heads, :] = 0
        return (z.flatten(-2),)

    handles = [
        module.register_forward_pre_hook(remove)
        for path, module in model.named_modules()
        if path.endswith(f".{projection}") and "attn" in path + "attn" * (name == "Bloom")
    ]
    with torch.no_grad():
        expected = model(**inputs).logits
        for handle in handles:
            handle.remove()
        with edit(
            model, {f"{modules}:attn.{site}": ablate("zero", (slice(None), 1 if len(heads) > 1 else 2))}
        ):
            got = model(**inputs).logits
        assert not model(**inputs).logits.equal(expected)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


class Attend(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        weights = self.dropout(F.softmax(x @ x.mT, dim=-1))
        return weights @ x


def test_what_a_softmax_of_its_own_does_not_show_is_refused_with_a_remedy():
    model, x = Attend(), torch.randn(2, 3, 4, 5)
    for name in ("q", "k", "raw"):
        with (
            pytest.raises(InterpError, match=r"takes the softmax.*expected scores"),
            capture(model, f":attn.{name}"),
        ):
            model(x)
        with pytest.raises(InterpError, match="takes the softmax"), edit(model, {f":attn.{name}": torch.neg}):
            model(x)
    model = Attend(0.5).train()
    with pytest.raises(InterpError, match=r"model\.eval\(\)"), capture(model, ":attn.pattern"):
        model(x)


def test_gradients_and_edits_of_scores_are_those_of_the_softmax():
    model, x = Attend(), torch.randn(2, 3, 4, 5, requires_grad=True)
    with capture(model, [":attn.v", ":attn.z"], grad=True) as acts:
        (model(x) ** 2).sum().backward()
    z = (F.softmax(x @ x.mT, -1) @ x).detach()
    torch.testing.assert_close(acts.gradients[":attn.z"], 2 * z)
    torch.testing.assert_close(acts.gradients[":attn.v"], F.softmax(x @ x.mT, -1).mT.detach() @ (2 * z))
    with torch.no_grad(), edit(model, {":attn.scores": partial(torch.mul, other=0.5)}):
        torch.testing.assert_close(model(x), F.softmax(x @ x.mT / 2, -1) @ x)
