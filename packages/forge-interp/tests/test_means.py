"""Means that `site_means` takes: over which places, and without padding."""

import pytest
import torch
import torch.nn.functional as F
from forge_interp import InterpError, ablate, edit, site_means
from torch import nn


class Flat(nn.Module):
    """Puts batch and positions into one dimension, as mixtures of experts do, or routes some rows."""

    def __init__(self, rows=None):
        super().__init__()
        self.embed, self.experts, self.rows = nn.Embedding(9, 4), nn.Linear(4, 4), rows

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids)
        if self.rows is None:
            return self.experts(x.flatten(0, 1)).view_as(x)
        return self.experts(self.rows(x.flatten(0, 1)))


MASK = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])


def test_means_of_values_with_batch_and_positions_in_one_dimension_leave_out_what_keep_says():
    torch.manual_seed(0)
    model, ids = Flat(), torch.randint(9, (2, 5))
    inputs = {"input_ids": ids, "attention_mask": MASK}
    plain = model(**inputs)
    expected = plain[MASK.bool()].mean(0)
    means = site_means(model, [inputs], "experts", keep=[MASK.flatten()])
    torch.testing.assert_close(means["experts:out"], expected)
    got = run_named(model, inputs, {"experts": ablate("mean", mean=means)})
    torch.testing.assert_close(got, expected.expand_as(got))
    assert not torch.allclose(expected, plain.mean((0, 1)))


def run_named(model, inputs, edits):
    with edit(model, edits):
        return model(**inputs)


ROWS = {
    "some": lambda x: x[:7],
    "as many as tokens, sorted by expert": lambda x: x[x[:, 0].argsort()],
    "as many as samples": lambda x: x[:2],
}


@pytest.mark.parametrize("how", ["attention_mask", "keep"])
@pytest.mark.parametrize("rows", ROWS)
def test_means_are_refused_where_it_is_unknown_which_rows_are_padding(rows, how):
    model, ids = Flat(ROWS[rows]), torch.randint(9, (2, 5))
    inputs = {"input_ids": ids, "attention_mask": MASK}
    with pytest.raises(InterpError, match=r"value \[\d+, 4\].*unknown which rows are padding"):
        site_means(model, [inputs], "experts", keep=[MASK] if how == "keep" else None)
    full = inputs | {"attention_mask": torch.ones(2, 5)}
    expected = model(**full).mean(0)
    torch.testing.assert_close(site_means(model, [full], "experts")["experts:out"], expected)


def test_means_leave_padding_out_of_the_experts_of_a_mixtral():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=9,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
    )
    torch.manual_seed(0)
    model, ids = transformers.MixtralForCausalLM(config).eval(), torch.randint(9, (2, 5))
    seen = []
    block = model.model.layers[0].mlp
    handle = block.experts.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        model(ids, attention_mask=MASK)
        handle.remove()
        inputs, site = {"input_ids": ids, "attention_mask": MASK}, "model.layers.0.mlp.experts"
        means = site_means(model, [inputs], site, keep=[MASK.flatten()])
    assert seen[0].shape == (10, 8)
    expected = seen[0][MASK.flatten().bool()].mean(0)
    torch.testing.assert_close(means["model.layers.0.mlp.experts:out"], expected)


def test_means_of_attention_without_a_batch_are_of_each_head():
    class Heads(nn.Module):
        def forward(self, q, attention_mask=None):
            return F.scaled_dot_product_attention(q, q, q)

    q = torch.randn(3, 5, 8)
    plain = Heads()(q)
    means = site_means(Heads(), [{"q": q}], ":attn.z")
    got = run_named(Heads(), {"q": q}, {":attn.z": ablate("mean", mean=means)})
    torch.testing.assert_close(got, plain.mean(1, keepdim=True).expand_as(plain))
    with pytest.raises(InterpError, match="padding"):
        site_means(Heads(), [{"q": q, "attention_mask": MASK}], ":attn.z")


class Attends(nn.Module):
    def forward(self, x, attention_mask):
        heads = x.unflatten(-1, (2, 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, attention_mask[:, None, None].bool())


@pytest.mark.parametrize("part", ["q", "k", "v", "z", "pattern"])
def test_means_of_attention_at_an_index_are_refused_where_it_takes_padding(part):
    x, last = torch.randn(2, 5, 4), (slice(None), slice(None), -1)
    with pytest.raises(InterpError, match=f"takes padding at ':attn.{part}'"):
        site_means(Attends(), [{"x": x, "attention_mask": MASK}], f":attn.{part}", where=last)
    found = site_means(Attends(), [{"x": x, "attention_mask": MASK.flip(1)}], ":attn.v", where=last)
    torch.testing.assert_close(found[":attn.v"].flatten(), x[:, -1].mean(0))
