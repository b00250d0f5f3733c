import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from forge_interp import InterpError, capture, each_attention, edit
from forge_interp.attention.tiles import Gate
from torch import nn


class Attention(nn.Module):
    def forward(self, x):
        first = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return F.scaled_dot_product_attention(query=first, key=x, value=x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()

    def forward(self, x):
        return self.attn(x) + F.scaled_dot_product_attention(x, x, x)


@pytest.fixture
def model():
    return nn.Sequential(Block(), Block())


@pytest.fixture
def x():
    return torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))


def test_each_attention_shows_every_call_with_its_module(model, x):
    calls = []
    with each_attention(model, "**.attn", lambda name, call: calls.append((name, call.output.clone()))):
        model(x)
    assert [name for name, _ in calls] == ["0.attn", "0.attn#1", "1.attn", "1.attn#1"]
    assert torch.equal(calls[0][1], F.scaled_dot_product_attention(x, x, x, is_causal=True))


def test_attention_goes_to_the_innermost_module_that_was_asked_for(model, x):
    with capture(model, ["*:attn.z", "**.attn:attn.z"]) as both, capture(model, "*:attn.z") as outer:
        model(x)
    assert list(both) == [f"{i}{s}" for i in (0, 1) for s in (".attn:attn.z", ".attn:attn.z#1", ":attn.z")]
    assert list(outer) == [f"{i}:attn.z{s}" for i in (0, 1) for s in ("", "#1", "#2")]
    assert torch.equal(outer["0:attn.z"], both["0.attn:attn.z"])


def test_each_attention_sees_edits(model, x):
    outputs = []
    with (
        edit(model, {"0.attn:attn.v": torch.zeros_like}),
        each_attention(model, "0.attn", lambda name, call: outputs.append(call.output)),
    ):
        model(x)
    assert not outputs[0].any()


def test_each_attention_raises_when_nobody_calls_it(x):
    model = nn.ReLU()
    with pytest.raises(InterpError, match=r"called F\.scaled_dot_product"), each_attention(model, "", print):
        model(x)


@pytest.mark.parametrize("grad", [False, True])
def test_attention_inside_multihead_attention_is_seen(grad):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval()
    x = torch.randn(2, 5, 8)
    _, expected = layer.self_attn(x, x, x, average_attn_weights=False)
    before = F.scaled_dot_product_attention
    with torch.set_grad_enabled(grad), capture(layer, ["self_attn:attn.pattern", "linear1"]) as acts:
        layer(x)
    torch.testing.assert_close(acts["self_attn:attn.pattern"], expected.detach())
    assert F.scaled_dot_product_attention is before


def test_the_interception_ends_with_the_block_when_a_model_raises(model, x):
    with pytest.raises(ZeroDivisionError), capture(model, "**.attn:attn.z"):
        model(x)
        raise ZeroDivisionError
    assert torch.overrides._get_current_function_mode_stack() == []


def test_an_exception_inside_the_model_leaves_no_module_running(model, x):
    class Failing(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    model[0].attn.register_forward_hook(lambda module, args, output: None)
    model.insert(1, Failing())
    with capture(model, ["0.attn:attn.z", "2.attn:attn.z", "1:in"]) as acts:
        with pytest.raises(ZeroDivisionError):
            model(x)
        acts.clear()
        model[2](x)
    assert list(acts) == ["2.attn:attn.z", "2.attn:attn.z#1"]


def test_an_interrupted_module_is_left_with_the_one_around_it(model, x):
    class Interrupted(Attention):
        def forward(self, x):
            super().forward(x)
            raise KeyboardInterrupt

    class Guard(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Interrupted()

        def forward(self, x):
            try:
                return self.inner(x)
            except KeyboardInterrupt:
                return x

    guarded = nn.Sequential(Guard(), Attention())
    with capture(guarded, ["0.inner:attn.z", "0:in"]) as acts:
        guarded(x)
    assert list(acts) == ["0:in", "0.inner:attn.z", "0.inner:attn.z#1"]


def test_an_interruption_leaves_nothing_of_the_model(x):
    class Interrupted(Attention):
        def forward(self, x):
            raise KeyboardInterrupt

    model = nn.Sequential(Interrupted())
    gone = weakref.ref(model[0])
    with pytest.raises(KeyboardInterrupt), capture(model, ["0:attn.z", "0:in"]):
        model(x)
    del model
    gc.collect()
    assert gone() is None


def test_the_gate_is_passed_once_by_each_call_where_it_is_needed(model, x, monkeypatch):
    checked, true = [], Gate.verify
    monkeypatch.setattr(Gate, "verify", lambda gate: [checked.append(gate), true(gate)][1])
    with capture(model, ["*.attn:attn.pattern", "*.attn:attn.raw", "*.attn:attn.entropy"]):
        model(x)
        model(x)
    assert len(checked) == 2 * 2 * 2  # modules, calls in each, passes
    with capture(model, ["*.attn:attn.pattern", "*.attn:attn.entropy"], check_attention=False):
        model(x)
    with capture(model, ["*.attn:attn.q", "*.attn:attn.k", "*.attn:attn.v", "*.attn:attn.z"]):
        model(x)
    assert len(checked) == 2 * 2 * 2  # modules, calls in each, passes
    monkeypatch.setattr(Gate, "verify", fail)
    for part in ("raw", "scores", "pattern", "entropy", "sink", "previous", "lag.2"):
        with pytest.raises(InterpError, match="gate"), capture(model, f"0.attn:attn.{part}"):
            model(x)


def fail(call):
    raise InterpError("gate")
