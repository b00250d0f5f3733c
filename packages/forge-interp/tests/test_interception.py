import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from forge_interp import InterpError, capture, each_attention, edit
from forge_interp.hooks.engine.attend import Interception, is_intercepted
from torch import nn


@pytest.fixture
def x():
    return torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(0))


def test_interception_hands_over_attention_as_it_was_called_and_nothing_else(x):
    seen = []

    def attend(attention, args, kwargs, lineage):
        seen.append((args, kwargs))
        return attention(*args, **kwargs) + 1

    expected = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    with Interception(attend):
        assert is_intercepted()
        assert torch.equal(torch.add(x, x, alpha=2), 3 * x)
        out = F.scaled_dot_product_attention(x, x, value=x, is_causal=True)
    assert not is_intercepted()
    assert torch.equal(out, expected + 1)
    ((args, kwargs),) = seen
    assert [args[0] is x, args[1] is x, kwargs["value"] is x, kwargs["is_causal"]] == [True] * 4
    assert torch.equal(F.scaled_dot_product_attention(x, x, x, is_causal=True), expected)


def test_attention_in_multihead_attention_of_two_threads_goes_to_the_right_capture():
    errors, before = [], F.scaled_dot_product_attention
    interval = sys.getswitchinterval()

    def run(size):
        layer = nn.MultiheadAttention(4, 1, batch_first=True).eval()
        x = torch.randn(1, size, 4)
        try:
            for _ in range(30):
                with torch.no_grad(), capture(layer, ":attn.z", check_attention=False) as acts:
                    layer(x, x, x, need_weights=False)
                assert list(acts) == [":attn.z"]
                assert acts[":attn.z"].shape == (1, 1, size, 4)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(size,)) for size in (3, 4)]
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert errors == []
    assert F.scaled_dot_product_attention is before


def test_one_thread_at_a_time_exchanges_the_name():
    layer, before = nn.MultiheadAttention(4, 1, batch_first=True).eval(), F.scaled_dot_product_attention
    second_is_inside, first_is_done = threading.Event(), threading.Event()

    def first(attention, args, kwargs, lineage):
        second_is_inside.wait(0.3)
        return attention(*args, **kwargs)

    def second(attention, args, kwargs, lineage):
        second_is_inside.set()
        first_is_done.wait(5)
        return attention(*args, **kwargs)

    def call(attend, then):
        x = torch.ones(1, 3, 4)
        with torch.no_grad(), Interception(attend):
            layer(x, x, x, need_weights=False)
        then.set()

    threads = [
        threading.Thread(target=call, args=(first, first_is_done)),
        threading.Thread(target=call, args=(second, threading.Event())),
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert F.scaled_dot_product_attention is before


def test_a_failing_multihead_attention_puts_the_name_back(x):
    layer, before = nn.MultiheadAttention(4, 1, batch_first=True).eval(), F.scaled_dot_product_attention

    def fail(value):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), edit(layer, {":attn.z": fail}):
        layer(x[0], x[0], x[0], need_weights=False)
    assert F.scaled_dot_product_attention is before
    assert not is_intercepted()


class Einsum(nn.Module):
    def forward(self, x):
        return torch.einsum("bnts,bnsh->bnth", (x @ x.mT).softmax(-1), x)


@pytest.mark.parametrize(
    "look",
    [
        lambda model: capture(model, ":attn.pattern"),
        lambda model: edit(model, {":attn.q": lambda v: v}),
        lambda model: each_attention(model, "", lambda name, call: None),
    ],
)
def test_the_error_names_a_remedy_when_a_module_computes_its_own_softmax(look, x):
    says = r"FlexAttention.*capture the projections"
    model = Einsum()
    with pytest.raises(InterpError, match=says), look(model):
        model(x)
    layer = nn.MultiheadAttention(4, 1, batch_first=True)
    with pytest.raises(InterpError, match="need_weights=False"), look(layer):
        layer(x[0], x[0], x[0])


def test_the_package_and_a_capture_load_no_compiler():
    code = """
import sys
import torch
before = "torch._dynamo" in sys.modules
import forge_interp
from torch import nn
model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
x = torch.randn(2, 3, 8)
with forge_interp.capture(model, ["self_attn:attn.pattern", "**"], stop=True) as acts:
    model(x)
with forge_interp.edit(model, {"self_attn:attn.pattern": forge_interp.ablate()}):
    model(x)
assert not before and len(acts) > 9
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
