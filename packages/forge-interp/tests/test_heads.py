"""A head is the same head in every call: padded or not, prefill or decode, greedy or with beams."""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers
from forge_interp import (
    InterpError,
    ablate,
    activation_patching,
    attribution_patching,
    capture,
    edit,
    patch,
    site_means,
)

from .zoo import FAMILIES, GROUPED, VOCAB, build, text

N, K = 4, 2


@pytest.fixture(scope="module")
def model():
    return FAMILIES["llama"]().build("sdpa")


def without_head(model, head):
    """What the output projection is given, the head's part set to zero: exactly that head is gone."""

    def hook(module, args):
        z = args[0].unflatten(-1, (N, -1)).clone()
        z[..., head, :] = 0
        return (z.flatten(-2),)

    return [layer.self_attn.o_proj.register_forward_pre_hook(hook) for layer in model.model.layers]


def generated(model, inputs, **options):
    with torch.no_grad():
        options |= {"max_new_tokens": 5, "return_dict_in_generate": True, "output_scores": True}
        found = model.generate(**inputs, **options, do_sample=False)
    return found.sequences, torch.stack(found.scores)


@pytest.mark.parametrize("head", range(N))
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_editing_a_head_removes_that_head_in_every_call_of_generate(model, head, beams, padded):
    inputs = text(padded)
    handles = without_head(model, head)
    expected = generated(model, inputs, num_beams=beams)
    for handle in handles:
        handle.remove()
    with edit(model, {"**.self_attn:attn.z": ablate("zero", (slice(None), head))}):
        tokens, scores = generated(model, inputs, num_beams=beams)
    assert tokens.equal(expected[0])
    assert scores.equal(expected[1])


@pytest.mark.parametrize("name", ["pattern", "q", "k", "v"])
def test_edits_that_change_nothing_leave_generate_as_it_was(model, name):
    inputs = text(True)
    expected = generated(model, inputs)
    with edit(model, {f"**.self_attn:attn.{name}": lambda value: value.clone()}):
        tokens, scores = generated(model, inputs)
    assert tokens.equal(expected[0])
    torch.testing.assert_close(scores, expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_every_call_has_the_same_heads(model, padded):
    names = ["q", "k", "v", "raw", "scores", "pattern", "z", "entropy"]
    with capture(model, [f"model.layers.0.self_attn:attn.{name}" for name in names]) as acts:
        generated(model, text(padded))
    for call in range(5):
        new, old = (9, 9) if call == 0 else (1, 9 + call)
        got = {name: tuple(acts[f"model.layers.0.self_attn:attn.{name}#{call}"].shape) for name in names}
        assert got == {
            "q": (2, N, new, 8), "k": (2, K, old, 8), "v": (2, K, old, 8), "z": (2, N, new, 8),
            "raw": (2, N, new, old), "scores": (2, N, new, old), "pattern": (2, N, new, old),
            "entropy": (2, N, new),
        }  # fmt: skip


def test_decoding_shows_each_head_what_the_whole_text_shows_it(model):
    """The last query of a longer text, computed at once, is the decode call's only one, head by head."""
    inputs = text(True)
    names = ["q", "k", "v", "scores", "pattern", "z", "entropy", "sink"]
    sites = [f"model.layers.0.self_attn:attn.{name}" for name in names]
    with capture(model, sites) as step:
        tokens, _ = generated(model, inputs)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, tokens.shape[1] - 9, dtype=torch.long)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), capture(model, sites) as whole:
        model(tokens[:, :11], attention_mask=mask[:, :11], position_ids=positions[:, :11])
    for site, name in zip(sites, names, strict=True):
        expected = whole[site] if name in ("k", "v") else whole[site][:, :, -1:]
        got, seen = step[f"{site}#2"], expected.isfinite()
        if name == "scores":
            seen &= expected > -1e30
            assert got.masked_fill(seen, 0).lt(-1e30).equal(~seen)
        torch.testing.assert_close(got[seen], expected[seen], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("tool", [activation_patching, attribution_patching])
def test_patching_tables_of_keys_have_one_column_a_key_head_padded_or_not(model, tool, name):
    def metric(output):
        return output.logits[:, -1, 3].mean() - output.logits[:, -1, 5].mean()

    tables = []
    for padded in (False, True):
        clean, corrupted = text(padded), text(padded)
        corrupted["input_ids"][:, -2] = 7
        found = tool(model, clean, corrupted, f"model.layers.*.self_attn:attn.{name}", metric, where="heads")
        tables.append(found)
    assert [table.values.shape for table in tables] == [(2, K), (2, K)]


def test_gradients_of_keys_are_those_of_the_shared_ones(model):
    """With a mask the keys are repeated for the heads; the gradient of a key is the sum over its heads."""
    inputs, site = text(True), "model.layers.0.self_attn:attn.k"

    def loss():
        return model(**inputs).logits.square().sum()

    with capture(model, site, grad=True) as acts:
        loss().backward()
    model.zero_grad()
    step = 1e-3 * torch.randn(2, K, 9, 8, generator=torch.Generator().manual_seed(0))
    double = build("LlamaForCausalLM", model.config, "sdpa").double()
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            with edit(double, {site: lambda key, sign=sign: key + sign * step.double()}):
                values.append(double(**inputs).logits.square().sum())
    measured = (values[0] - values[1]) / 2
    torch.testing.assert_close((acts.gradients[site] * step).sum().double(), measured, rtol=1e-3, atol=1e-3)


class Repeats(nn.Module):
    """Keys and values repeated in the ways that models have."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        q = x[:, None].expand(-1, N, -1, -1) * torch.arange(1, N + 1)[:, None, None]
        kv = torch.stack([x, -x], dim=1)
        many = {
            "repeat_interleave": lambda: kv.repeat_interleave(N // K, dim=1),
            "torch.repeat_interleave": lambda: torch.repeat_interleave(kv, N // K, 1),
            "expand": lambda: kv[:, :, None].expand(-1, -1, N // K, -1, -1).reshape(2, N, *kv.shape[2:]),
            "flatten": lambda: kv.unsqueeze(2).expand(2, K, N // K, 3, 4).flatten(1, 2),
        }[self.how]()
        return nn.functional.scaled_dot_product_attention(q, many, many)


@pytest.mark.parametrize("how", ["repeat_interleave", "torch.repeat_interleave", "expand", "flatten"])
def test_keys_repeated_for_the_heads_are_read_and_edited_as_they_were_before(how):
    model, x = Repeats(how), torch.randn(2, 3, 4)
    with capture(model, [":attn.k", ":attn.v", ":attn.pattern"]) as acts:
        model(x)
    assert acts[":attn.k"].equal(torch.stack([x, -x], dim=1))
    assert acts[":attn.v"].shape == (2, K, 3, 4)
    with edit(model, {":attn.v": patch(0.0, (slice(None), 1))}):
        z = model(x)
    assert z[:, :2].any() and not z[:, 2:].any()


def test_grouped_names_the_family():
    assert GROUPED["num_attention_heads"] == N and GROUPED["num_key_value_heads"] == K


def test_the_mask_of_an_encoder_says_nothing_of_its_decoder_so_means_ask_for_keep():
    config = transformers.BartConfig(
        vocab_size=VOCAB,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
    )
    model, site = build("BartModel", config, "sdpa"), "decoder.layers.0"
    inputs = text(True)
    inputs["decoder_input_ids"] = inputs["input_ids"].flip(1)
    keep = torch.ones_like(inputs["input_ids"])
    with pytest.raises(InterpError, match=r"that of its encoder.*expected keep="):
        site_means(model, [inputs], site)
    with torch.no_grad(), capture(model, site) as acts:
        model(**inputs)
    mean = acts[site].mean((0, 1))
    means = site_means(model, [inputs], site, keep=[keep])
    torch.testing.assert_close(means[f"{site}:out"], mean)
    got = run_with(model, {site: ablate("mean", mean=means)}, inputs)
    torch.testing.assert_close(got, mean.expand_as(got))


def run_with(model, edits, inputs):
    with torch.no_grad(), edit(model, edits), capture(model, list(edits)) as acts:
        model(**inputs)
    return next(iter(acts.values()))
