"""Attention of models that take the softmax themselves, beside the weights that they return."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers")

import transformers
from forge_interp import InterpError, ablate, attention_statistics, capture, each_attention, edit

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
SINKS = GROUPED | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}
SINKS |= {
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
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
    "GptOss": ("GptOssForCausalLM", SINKS, "**.self_attn", "o_proj"),
}
REPEATED = ("Gemma2", "Llama", "GptOss")


def made(name):
    model, config, modules, projection = EAGER[name]
    config = getattr(transformers, f"{name}Config")(**config)
    return build(model, config, "eager"), modules, projection


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", EAGER)
def test_patterns_are_the_weights_that_the_model_returns(name, padded):
    model, modules, _ = made(name)
    inputs = text(padded)
    names = ["scores"] * (name != "GptOss") + ["pattern", "v", "z", "entropy"]
    sinks = []
    with torch.no_grad(), capture(model, [f"{modules}:attn.{part}" for part in names]) as acts:
        expected = model(**inputs, output_attentions=True).attentions
        with each_attention(
            model, modules, lambda site, call: sinks.append(attention_statistics(call, ["sink"])["sink"])
        ):
            model(**inputs)
    found = [acts[key] for key in acts if key.endswith("attn.pattern")]
    assert len(found) == len(expected) == 2 == len(sinks) and sinks[0].shape[1] == N
    for key, weights in zip((key for key in acts if key.endswith("attn.pattern")), expected, strict=True):
        torch.testing.assert_close(acts[key], weights, rtol=0, atol=1e-5)
        v, z = (acts[key.replace("pattern", part)] for part in ("v", "z"))
        assert v.shape[1] == (2 if name in REPEATED else N)
        torch.testing.assert_close(weights @ v.repeat_interleave(N // v.shape[1], 1), z, rtol=0, atol=1e-5)


@pytest.mark.parametrize("site", ["z", "pattern", "v"])
@pytest.mark.parametrize("name", [name for name, (*_, projection) in EAGER.items() if projection])
def test_edits_of_a_head_equal_its_removal_before_the_projection(name, site):
    model, modules, projection = made(name)
    inputs, grouped = text(False), name in REPEATED
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


class Sinks(Attend):
    """The softmax goes over one more key, without a value: the first or the last."""

    def __init__(self, is_first=False):
        super().__init__()
        self.is_first = is_first

    def forward(self, x):
        scores = x @ x.mT
        sink = torch.ones_like(scores[..., :1])
        weights = F.softmax(torch.cat([sink, scores] if self.is_first else [scores, sink], dim=-1), dim=-1)
        self.weights = weights[..., 1:] if self.is_first else weights[:, :, :, :-1]
        return self.dropout(self.weights) @ x


@pytest.mark.parametrize("is_first", [False, True])
def test_weights_beside_a_sink_are_those_of_the_product_and_scores_are_refused(is_first):
    model, x = Sinks(is_first), torch.randn(2, 3, 4, 5)
    with capture(model, [":attn.pattern", ":attn.z", ":attn.entropy"]) as acts:
        output = model(x)
    assert acts[":attn.pattern"].equal(model.weights) and acts[":attn.z"].equal(output)
    assert (acts[":attn.pattern"].sum(-1) < 0.999).any()
    torch.testing.assert_close(acts[":attn.entropy"], torch.special.entr(model.weights).sum(-1))
    with edit(model, {":attn.pattern": partial(torch.mul, other=0.5)}):
        torch.testing.assert_close(model(x), output / 2)
    for context in (capture(model, ":attn.scores"), edit(model, {":attn.scores": torch.neg})):
        with pytest.raises(InterpError, match="sinks; expected pattern"), context:
            model(x)


class Indexed(Attend):
    """Takes all of another softmax by an index that names no dimension."""

    def forward(self, x):
        self.weights = F.softmax(x @ x.mT, dim=-1)
        return (self.weights @ x) * F.softmax(x, dim=-1)[()]


def test_softmax_may_be_indexed_without_a_dimension():
    model, x = Indexed(), torch.randn(2, 3, 4, 5)
    with capture(model, ":attn.pattern") as acts:
        model(x)
    assert acts[":attn.pattern"].equal(model.weights)


class Gated(Attend):
    """Changes the weights in place after the softmax."""

    def forward(self, x):
        weights = F.softmax(x @ x.mT, dim=-1)
        weights *= torch.tensor([1.0, 0.5, 0.0])[:, None, None]
        return weights @ x


def test_weights_that_are_changed_after_the_softmax_are_refused_for_reading_and_editing():
    model, x = Gated(), torch.randn(2, 3, 4, 5)
    sites = {":attn.scores": torch.clone, ":attn.pattern": torch.clone}
    for context in (
        *(edit(model, {site: change}) for site, change in sites.items()),
        capture(model, [*sites]),
    ):
        with pytest.raises(InterpError, match="something else takes part"), context:
            model(x)
    expected = model(x)
    with edit(model, {":attn.z": partial(torch.mul, other=2)}):
        torch.testing.assert_close(model(x), 2 * expected)
