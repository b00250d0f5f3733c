from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from forge_interp import InterpError, ablate, capture, edit, patch, site_means, steer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


class Attention(nn.Module):
    def __init__(self, dim=8, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(z.transpose(1, 2).flatten(2))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Attention(), nn.Linear(8, 8))


@pytest.fixture
def x():
    return torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))


def run(model, x, edits):
    with edit(model, edits):
        return model(x)


def test_patch_puts_a_value_in_place(model, x):
    new = torch.randn(3, 5, 8)
    assert torch.equal(run(model, x, {"1": patch(new)}), model[2](new))
    assert torch.equal(run(model, x, {"2:in": patch(new)}), model[2](new))


def test_patch_touches_only_where(model, x):
    plain, new = model[1](model[0](x)), torch.randn(8)
    expected = plain.clone()
    expected[:, -1] = new
    assert torch.equal(run(model, x, {"1": patch(new, (slice(None), -1))}), model[2](expected))


def test_edit_changes_an_argument_however_it_is_given(x):
    class Sum(nn.Module):
        def forward(self, x, other=None, *more, last=None):
            return x + 10 * other + 100 * last

    class Caller(nn.Module):
        def __init__(self, call):
            super().__init__()
            self.sum = Sum()
            self.call = call

        def forward(self, x):
            return self.call(self.sum, x)

    for call in (
        lambda m, x: m(x, x, last=x),
        lambda m, x: m(x, other=x, last=x),
        lambda m, x: m(x=x, other=x, last=x),
    ):
        model = Caller(call)
        torch.testing.assert_close(run(model, x, {"sum:kw.last": torch.zeros_like}), 11 * x)
        torch.testing.assert_close(run(model, x, {"sum:kw.other": torch.zeros_like}), 101 * x)
        torch.testing.assert_close(run(model, x, {"sum:in": torch.zeros_like}), 110 * x)
        both = {"sum:kw.other": torch.zeros_like, "sum:in": lambda v: v * 2}
        torch.testing.assert_close(run(model, x, both), 102 * x)


@pytest.mark.parametrize(
    ("kept", "site"),
    [
        (lambda x: {"a": [x, {"b": x}]}, ":out.a.1.b"),
        (lambda x: [x, x], ":out.1"),
        (lambda x: Cache(x), ":out.values"),
    ],
)
def test_edit_leaves_what_a_module_keeps_of_its_output(x, kept, site):
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = kept(x)

        def forward(self, x):
            return self.kept

    model = Keeping()
    with edit(model, {site: torch.zeros_like}), capture(model, site) as acts:
        model(x)
    assert not acts[site].any()
    with capture(model, site) as acts:
        model(x)
    assert torch.equal(acts[site], x)


@dataclass(frozen=True)
class Cache:
    values: torch.Tensor


def test_steer_adds_a_scaled_vector(model, x):
    vector = torch.randn(8)
    expected = model[2](model[1](model[0](x) + 2 * vector))
    torch.testing.assert_close(run(model, x, {"0": steer(vector, 2)}), expected)
    last = model[0](x)
    last[:, -1] += vector
    torch.testing.assert_close(
        run(model, x, {"0": steer(vector, where=(slice(None), -1))}), model[2](model[1](last))
    )


def test_edits_follow_the_value_to_its_device_and_dtype():
    with FakeTensorMode():
        old = torch.empty(3, 8, dtype=torch.bfloat16, device="cuda")
        new = torch.empty(8)
        for change in (
            patch(new),
            steer(new),
            steer(new, where=0),
            ablate("mean", mean=new),
            ablate("resample"),
        ):
            assert (change(old).device, change(old).dtype) == (old.device, old.dtype)


def test_ablate_zeroes_means_and_resamples(model, x):
    value = model[1](model[0](x))
    assert torch.equal(run(model, x, {"1": ablate()}), model[2](torch.zeros_like(value)))
    given = torch.arange(8.0)
    torch.testing.assert_close(
        run(model, x, {"1": ablate("mean", mean=given)}), model[2](given.expand_as(value))
    )
    with capture(model, "1") as acts:
        run(model, x, {"1": ablate("resample")})
    taken = [int((acts["1"][i] == value).flatten(1).all(1).nonzero()) for i in range(3)]
    assert sorted(taken) == [0, 1, 2]
    assert all(i != j for i, j in enumerate(taken))


def test_ablate_puts_in_the_mean_of_each_head_and_channel(x):
    """That of `site_means`, over batch and positions; of patterns over the batch: positions stay apart."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    inputs = {"query": x, "key": x, "value": x, "need_weights": False}
    sites = [":attn.z", ":attn.pattern"]
    with torch.no_grad(), capture(attention, sites) as plain:
        attention(**inputs)
    means = site_means(attention, [inputs], sites)
    for where, heads in [(None, [0, 1]), ((slice(None), 1), [1])]:
        for site, dims in ((":attn.z", (0, 2)), (":attn.pattern", 0)):
            edits = {site: ablate("mean", where, mean=means)}
            with torch.no_grad(), edit(attention, edits), capture(attention, site) as acts:
                attention(**inputs)
            expected = plain[site].clone()
            expected[:, heads] = plain[site].mean(dims, keepdim=True).expand_as(expected)[:, heads]
            torch.testing.assert_close(acts[site], expected)


def test_ablate_asks_for_the_mean():
    with pytest.raises(InterpError, match=r"mean is None; expected a tensor, or what site_means"):
        ablate("mean")


def test_ablate_takes_means_over_a_data_set_by_site(model, x):
    batches = [x, x[:1] + 1, 2 * x]
    means = site_means(model, batches, ["0", "1"])
    rows = torch.cat([model[0](batch).flatten(0, 1) for batch in batches])
    torch.testing.assert_close(means["0:out"], rows.mean(0))
    got = run(model, x, {"1": ablate("mean", (..., slice(0, 3)), mean=means)})
    value = model[1](model[0](x)).clone()
    value[..., :3] = means["1:out"][:3]
    torch.testing.assert_close(got, model[2](value))
    with pytest.raises(InterpError, match="no mean for '0:out'"):
        run(model, x, {"0": ablate("mean", mean={"1:out": means["1:out"]})})


def test_means_over_a_data_set_are_of_each_head_and_leave_padding_out():
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x, keep = torch.randn(3, 5, 8), torch.rand(3, 5) > 0.4
    batches = [{"query": x, "key": x, "value": x, "need_weights": False}]
    means = site_means(model, batches, ":attn.z", keep=[keep])
    with torch.no_grad(), capture(model, ":attn.z") as acts:
        model(**batches[0])
    torch.testing.assert_close(means[":attn.z"][0, :, 0], acts[":attn.z"].transpose(1, 2)[keep].mean(0))


def test_means_over_a_data_set_leave_out_the_padding_that_the_attention_mask_of_the_inputs_says():
    class Model(nn.Module):
        def forward(self, x, attention_mask=None):
            return x * 2

    x, keep = torch.randn(2, 3, 4), torch.tensor([[0, 1, 1], [1, 1, 1]])
    means = site_means(Model(), [{"x": x, "attention_mask": keep}], "")
    torch.testing.assert_close(means[":out"], 2 * x[keep.bool()].mean(0))
    torch.testing.assert_close(site_means(Model(), [{"x": x}], "")[":out"], 2 * x.mean((0, 1)))
    with pytest.raises(InterpError, match="a mask for each"):
        site_means(Model(), [x, x], "", keep=[keep])


def test_ablate_raises_when_the_way_is_unknown_or_there_is_nobody_to_resample_from(model, x):
    with pytest.raises(InterpError, match="expected 'zero'"):
        ablate("nothing")
    with pytest.raises(InterpError, match="batch of one"):
        run(model, x[:1], {"1": ablate("resample")})


def test_edits_of_an_outer_with_come_first_and_captures_see_all(model, x):
    plain = model[0](x)
    add, double = edit(model, {"0": lambda v: v + 1}), edit(model, {"0": lambda v: v * 2})
    with capture(model, "0") as after, capture(model, "0", before_edits=True) as before, add, double:
        model(x)
    torch.testing.assert_close(after["0"], (plain + 1) * 2)
    assert torch.equal(before["0"], plain)


def test_edit_of_one_call_leaves_the_others(x):
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, layer, layer)
    expected = layer(layer(layer(x)) * 0)
    assert torch.equal(run(model, x, {"0#1": ablate()}), expected)


def test_gradients_flow_through_edits(model, x):
    scale = torch.ones((), requires_grad=True)
    run(model, x, {"0": lambda v: v * scale}).sum().backward()
    start = model[0](x).detach()
    free = torch.ones((), requires_grad=True)
    model[2](model[1](start * free)).sum().backward()
    torch.testing.assert_close(scale.grad, free.grad)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_edit_of_attention_inputs_equals_attention_on_edited_inputs(model, x, name):
    with capture(model, ["1:attn.q", "1:attn.k", "1:attn.v"]) as acts:
        model(x)
    tensors = {part: acts[f"1:attn.{part}"] for part in "qkv"}
    tensors[name] = tensors[name] * 2
    z = F.scaled_dot_product_attention(*tensors.values(), is_causal=True)
    expected = model[2](model[1].out(z.transpose(1, 2).flatten(2)))
    torch.testing.assert_close(run(model, x, {f"1:attn.{name}": lambda v: v * 2}), expected)


def test_edit_of_one_head_equals_its_removal_by_hand(model, x):
    with capture(model, "1:attn.z") as acts:
        model(x)
    z = acts["1:attn.z"].clone()
    z[:, 1] = 0
    expected = model[2](model[1].out(z.transpose(1, 2).flatten(2)))
    torch.testing.assert_close(run(model, x, {"1:attn.z": ablate(where=(slice(None), 1))}), expected)


@pytest.mark.parametrize("name", ["raw", "scores", "pattern"])
def test_edit_of_scores_equals_dense_attention(model, x, name):
    with capture(model, ["1:attn.raw", "1:attn.v"]) as acts:
        plain = model(x)
    torch.testing.assert_close(run(model, x, {f"1:attn.{name}": lambda v: v.clone()}), plain)

    def change(value, at):
        return value * 0.5 if name == at else value

    raw = change(acts["1:attn.raw"], "raw")
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    scores = change(raw.masked_fill(hidden, -torch.inf), "scores")
    z = change(scores.softmax(-1), "pattern") @ acts["1:attn.v"]
    expected = model[2](model[1].out(z.transpose(1, 2).flatten(2)))
    torch.testing.assert_close(run(model, x, {f"1:attn.{name}": lambda v: v * 0.5}), expected)


def test_capture_of_attention_sees_edits_or_what_was_before(model, x):
    sites = ["1:attn.q", "1:attn.z", "1:attn.pattern"]
    with capture(model, sites) as plain:
        model(x)
    with capture(model, sites) as after, capture(model, sites, before_edits=True) as before:
        run(model, x, {"1:attn.q": lambda q: q * 0})
    assert all(torch.equal(before[site], plain[site]) for site in sites)
    assert not after["1:attn.q"].any()
    torch.testing.assert_close(after["1:attn.pattern"][0, 0, 4], torch.full((5,), 0.2))
    with capture(model, sites) as after:
        run(model, x, {"1:attn.z": ablate()})
    assert torch.equal(after["1:attn.pattern"], plain["1:attn.pattern"])
    assert not after["1:attn.z"].any()


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        ({"1": lambda v: v[:, :2]}, r"gave \[3, 2, 8\]"),
        ({"1": lambda v: v.double()}, "float64, expected"),
        ({"1": lambda v: "no"}, "gave str"),
        ({"1": lambda v: None}, "gave None, expected a tensor"),
        ({"7": lambda v: v}, "names no module"),
        ({"0:attn.z": lambda v: v}, "edited nothing at '0:attn.z'"),
        ({"1:attn.entropy": lambda v: v}, "statistic cannot be edited"),
    ],
)
def test_edit_raises_when_it_cannot_be_made(model, x, edits, says):
    with pytest.raises(InterpError, match=says):
        run(model, x, edits)
    assert not model[1]._forward_hooks


def test_ablate_refuses_a_mean_that_it_would_not_use():
    with pytest.raises(InterpError, match="would not use the mean"):
        ablate("zero", mean=torch.ones(4))


def test_patch_takes_a_number(model, x):
    with torch.no_grad(), capture(model, "0") as acts, edit(model, {"0": patch(2.0)}):
        model(x)
    assert (acts["0"] == 2.0).all()
