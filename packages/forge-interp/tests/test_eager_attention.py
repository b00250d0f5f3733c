"""Attention of models that take the softmax themselves, beside the weights that they return."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers")

from forge_interp import InterpError, ablate, attention_statistics, capture, each_attention, edit

from .families import TABLE
from .zoo import text

N = 4
EAGER = {  # where attention is, and the projection behind it
    "Bloom": ("**.self_attention", "dense"),
    "GPTJ": ("**.attn", "out_proj"),
    "GPTNeo": ("**.attn.attention", "out_proj"),
    "CodeGen": ("**.attn", "out_proj"),
    "Mpt": ("**.attn", "out_proj"),
    "XGLM": ("**.self_attn", "out_proj"),
    "DebertaV2": ("**.attention.self", None),
    "gemma2": ("**.self_attn", "o_proj"),
    "llama": ("**.self_attn", "o_proj"),
    "GptOss": ("**.self_attn", "o_proj"),
}
REPEATED = ("gemma2", "llama", "GptOss")


def made(name):
    return TABLE[name]().build("eager"), *EAGER[name]


@pytest.mark.parametrize("name", EAGER)
def test_heads_and_statistics_are_those_of_a_softmax_of_the_model(name):
    model, modules, _ = made(name)
    names, sinks = ["scores"] * (name != "GptOss") + ["v", "entropy"], []
    with torch.no_grad(), capture(model, [f"{modules}:attn.{part}" for part in names]) as acts:
        weights = model(**text(True), output_attentions=True).attentions
        with each_attention(
            model, modules, lambda site, call: sinks.append(attention_statistics(call, ["sink"])["sink"])
        ):
            model(**text(True))
    assert len(sinks) == len(weights) == 2 and sinks[0].shape[1] == N
    values = [value for key, value in acts.items() if key.endswith("attn.v")]
    assert [value.shape[1] for value in values] == [2 if name in REPEATED else N] * 2
    entropies = [value for key, value in acts.items() if key.endswith("attn.entropy")]
    for entropy, expected in zip(entropies, weights, strict=True):
        if name != "GptOss":  # whose weights do not sum to 1
            expected = torch.special.entr(expected).sum(-1)
            torch.testing.assert_close(entropy[0], expected[0], rtol=0, atol=1e-5)


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
