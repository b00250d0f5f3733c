import gc
import inspect
import threading
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from forge_interp import InterpError, capture, edit
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.inner = nn.Linear(dim, dim)

    def forward(self, x, scale=None, *, shift=0.0):
        return x + torch.tanh(self.inner(x)) * (1 if scale is None else scale) + shift


class Stack(nn.Module):
    def __init__(self, depth=4, dim=8):
        super().__init__()
        self.layers = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 5)
        self.ran = []

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            self.ran.append(i)
            x = layer(x, shift=0.5 * torch.ones(()))
        return self.head(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Stack()


@pytest.fixture
def x():
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def by_hand(model, names, x):
    """{name: (input, output)} through plain hooks."""
    found, handles = {}, []
    for name in names:

        def keep(module, args, output, name=name):
            found[name] = (args[0].clone(), output.clone())

        handles.append(model.get_submodule(name).register_forward_hook(keep))
    model(x)
    for handle in handles:
        handle.remove()
    return found


def hooks_left(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_capture_equals_plain_hooks(model, x):
    expected = by_hand(model, ["layers.0", "layers.3", "head"], x)
    with capture(model, ["layers.*", "layers.*:in", "head:in", "head"]) as acts:
        model(x)
    assert list(acts)[:2] == ["layers.0:in", "layers.0:out"]
    assert len(acts) == 10
    for name, (into, out) in expected.items():
        assert torch.equal(acts[f"{name}:in"], into)
        assert torch.equal(acts[name], out)


def test_capture_reads_arguments_by_name_however_they_were_given(model, x):
    with capture(model, ["layers.0:kw.shift", "layers.0:kw.x"]) as acts:
        model(x)
    assert acts["layers.0:kw.shift"] == 0.5
    assert torch.equal(acts["layers.0:kw.x"], x)


def test_capture_raises_with_the_names_when_an_argument_is_missing(model, x):
    with (
        pytest.raises(InterpError, match="no argument 'mask', but x, shift"),
        capture(model, "layers.0:kw.mask"),
    ):
        model(x)


def test_the_input_of_a_call_by_names_is_its_first_tensor(x):
    model = Block(8)
    with capture(model, ":in") as acts:
        model(shift=0.5, x=x)
    assert torch.equal(acts[":in"], x)


def test_capture_numbers_the_calls_of_a_shared_module(model, x):
    shared = nn.Sequential(model.layers[0], model.layers[0], model.layers[0])
    first = model.layers[0](x)
    with capture(shared, "0") as acts:
        shared(x)
    assert list(acts) == ["0:out", "0:out#1", "0:out#2"]
    assert torch.equal(acts["0#0"], first)
    assert torch.equal(acts["0#1"], model.layers[0](first))
    with capture(shared, ["0:out#2"]) as only:
        shared(x)
    assert list(only) == ["0:out#2"]
    assert torch.equal(only["0#2"], acts["0#2"])


def test_clear_forgets_gradients_and_what_fired(model, x):
    with capture(model, ["head", "layers.0"], grad=True) as acts:
        model(x).sum().backward()
        assert len(acts.gradients) == len(acts.fired) == 2
        acts.clear()
        assert len(acts.gradients) == len(acts.fired) == len(acts) == 0


def test_clear_forgets_values_and_restarts_the_count(model, x):
    with capture(model, "head") as acts:
        model(x)
        first = acts["head"]
        model(x)
        assert list(acts) == ["head:out", "head:out#1"]
        acts.clear()
        assert not acts
        model(x + 1)
        assert list(acts) == ["head:out"]
        assert not torch.equal(acts["head"], first)


def test_capture_copies_are_safe_from_later_operations_in_place():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(4, 4)

        def forward(self, x):
            x = self.embed(x)
            kept = x.clone()
            x.relu_().add_(1)
            return x, kept

    model = InPlace()
    with torch.no_grad(), capture(model, ["embed", "embed:in"]) as acts:
        x = torch.randn(2, 4)
        _, kept = model(x)
        before = x.clone()
        x.zero_()
    assert torch.equal(acts["embed"], kept)
    assert torch.equal(acts["embed:in"], before)


def test_capture_leaves_outputs_hooks_and_grad_as_they_were(model, x):
    plain = model(x)
    with capture(model, "**") as acts:
        seen = model(x)
    assert torch.equal(plain, seen)
    assert seen.requires_grad
    assert not acts["head"].requires_grad
    assert hooks_left(model) == 0
    assert "forward" not in model.__dict__


def test_capture_cleans_up_when_the_model_raises(model):
    with pytest.raises(RuntimeError), capture(model, "layers.*", stop=True):
        model(torch.randn(3, 7))
    assert hooks_left(model) == 0
    assert "forward" not in model.__dict__


def test_capture_raises_when_a_site_never_ran(model, x):
    with pytest.raises(InterpError, match="captured nothing at 'head'"), capture(model, ["layers.0", "head"]):
        model.layers[0](x)


def test_lookup_says_what_there_is(model, x):
    with capture(model, ["layers.0", "layers.1"]) as acts:
        with pytest.raises(KeyError, match="has not run"):
            acts["layers.1"]
        model(x)
        with capture(model, "head#0") as other:
            with pytest.raises(KeyError, match="head:out: named by the capture, but it has not run"):
                other["head"]
            model.head(torch.zeros(8))
        with pytest.raises(KeyError, match=r"layers\.1:in: no such value; there are layers"):
            acts["layers.1:in"]
    assert "layers.1" in acts
    assert "layers.2" not in acts
    assert acts.get("layers.2") is None


def test_select_is_applied_before_the_copy(model, x):
    with capture(model, ["layers.*", "head"], select={"layers.*": lambda v: v[:1, :2].double()}) as acts:
        out = model(x)
    assert acts["layers.2"].shape == (1, 2)
    assert acts["layers.2"].dtype == torch.float64
    assert torch.equal(acts["head"], out)
    with (
        pytest.raises(InterpError, match="select is given for"),
        capture(model, "head", select={"layers.*": abs}),
    ):
        pass


def test_stop_ends_the_forward_after_the_last_site_with_the_same_values(model, x):
    with capture(model, ["layers.1", "layers.0:in"]) as full:
        model(x)
    model.ran.clear()
    with capture(model, ["layers.1", "layers.0:in"], stop=True) as acts:
        assert model(x) is None
        assert model.ran == [0, 1]
        acts.clear()
        assert model(x) is None
    assert all(torch.equal(acts[key], full[key]) for key in full)


def test_stop_counts_what_was_seen_in_each_pass(model, x):
    with capture(model, ["layers.0", "layers.1"], stop=True) as acts:
        model(x)
        model(x + 1)
    with capture(model, ["layers.0", "layers.1"]) as both:
        model(x)
        model(x + 1)
    assert list(acts) == list(both) == ["layers.0:out", "layers.1:out", "layers.0:out#1", "layers.1:out#1"]
    assert all(torch.equal(acts[key], both[key]) for key in both)


def test_stop_forgets_a_pass_that_failed(model, x):
    with capture(model, ["layers.0", "layers.1"], stop=True) as acts:
        with edit(model, {"layers.1": lambda v: 1 / 0}), pytest.raises(ZeroDivisionError):
            model(x)
        acts.clear()
        assert model(x) is None
    assert list(acts) == ["layers.0:out", "layers.1:out"]


def test_stop_at_the_input_of_the_model_runs_nothing(model, x):
    with capture(model, ":in", stop=True) as acts:
        assert model(x) is None
        assert torch.equal(acts[":in"], x)
        acts.clear()
        assert model(x + 1) is None
    assert model.ran == []
    assert torch.equal(acts[":in"], x + 1)


def test_stop_at_the_output_of_the_model_leaves_nothing_out(model, x):
    expected = model(x)
    with capture(model, ["layers.0", ""], stop=True) as acts:
        assert torch.equal(model(x), expected)
        acts.clear()
        assert torch.equal(model(x), expected)
    assert torch.equal(acts[""], expected)


def test_stop_ends_the_outermost_pass_of_a_model_that_calls_itself():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Identity()

        def forward(self, x, depth=1):
            x = self.layer(self(x + 1, depth - 1) if depth else x)
            return x + 1

    model, x = Twice(), torch.zeros(2)
    with capture(model, ["layer", ":in"], stop=True) as acts:
        assert model(x) is None
    assert torch.equal(acts["layer"], x + 1)
    sunk = []
    with capture(model, ["", "layer"], sink=lambda key, value: sunk.append(key)) as acts:
        acts.expect(["layer", "layer#1", "", "#1"])
        assert torch.equal(model(x), x + 3)
    assert sunk == ["layer:out", ":out#1", "layer:out#1", ":out"]


def test_stop_ends_each_call_of_forward_itself(model, x):
    with capture(model, ["layers.0", "layers.1"], stop=True) as acts:
        for i in range(3):
            acts.clear()
            assert model.forward(x + i) is None
            assert len(acts) == 2
        acts.clear()
        acts.expect(["layers.0"])
        assert model.forward(x) is None
    assert list(acts) == ["layers.0:out"]


def test_stop_ends_the_passes_of_two_threads(model, x):
    both, outs, turns = threading.Barrier(2, timeout=20), [], threading.local()

    def meet(value):
        if not hasattr(turns, "met"):
            turns.met = True
            both.wait()
        return value

    def run():
        outs.append(model(x))

    with edit(model, {"layers.0": meet}), capture(model, "layers.1", stop=True):
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(outs) == 2
    assert None in outs


def test_stop_waits_for_the_first_call_of_a_module_that_calls_itself():
    class Inner(nn.Module):
        def forward(self, x, depth=2):
            return self(x + 1, depth - 1) * 2 if depth else x

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x) + 1

    x = torch.zeros(2)
    for model, name in ((Outer(), "inner"), (Inner(), "")):
        for site, value in ((name, 8), (f"{name}#1", 4), (f"{name}#2", 2)):
            with capture(model, site, stop=True) as acts:
                for _ in range(2):
                    acts.clear()
                    out = model(x)
                    assert out is None or (name, value) == ("", 8)
                    assert torch.equal(acts[site], x + value)


def test_stop_raises_when_only_a_part_of_the_model_is_called(model, x):
    with pytest.raises(InterpError, match="give that part to capture"), capture(model, "layers.0", stop=True):
        model.layers[0](x)
    block, says = model.layers[0], "passes of the Stack .*give that part"
    refused, inner = pytest.raises(InterpError, match=says), capture(model, "layers.0.inner", stop=True)
    with capture(block, ":in", sink=lambda key, value: None), refused, inner:
        block(x)


@pytest.mark.parametrize("stop", [False, True])
def test_expect_waits_for_the_output_of_the_model(model, x, stop):
    sunk = []
    with capture(model, ["layers.0", ""], stop=stop, sink=lambda key, value: sunk.append(key)) as acts:
        for _ in range(2):
            acts.clear()
            acts.expect(["layers.0", ""])
            model(x)
        acts.clear()
        acts.expect(["layers.0", "", "#1"])
        with pytest.raises(InterpError, match=r"\[':out#1'\] too few"):
            model(x)
    assert sunk == ["layers.0:out", ":out"] * 3


def test_expect_raises_when_clear_was_forgotten(model, x):
    with capture(model, ["layers.0", ":in"], stop=True) as acts:
        acts.expect(["layers.0", ":in"])
        assert model(x) is None
        with pytest.raises(InterpError, match=r"\[':in#1', 'layers\.0:out#1'\] too many.*call clear"):
            model(x)


def test_expect_is_refused_by_a_capture_that_does_not_look_at_passes(model):
    with pytest.raises(InterpError, match="stop=True or a sink"), capture(model, "head") as acts:
        acts.expect(["head"])


def test_the_model_keeps_its_signature_while_it_may_be_stopped(model, x):
    before = inspect.signature(model.forward), model.forward.__name__
    with capture(model, "head", stop=True):
        assert (inspect.signature(model.forward), model.forward.__name__) == before
        model(x)


def test_select_must_give_a_tensor(model, x):
    says = "select of 'head:out' gave int, expected a tensor"
    with pytest.raises(InterpError, match=says), capture(model, "head", select=len):
        model(x)


def test_sites_named_twice_take_the_first_select_that_names_them(model, x):
    sites = ["layers.0", "layers.*", "head"]
    with capture(model, sites, select={"layers.*": lambda v: v[:1]}) as acts:
        model(x)
    assert [len(value) for value in acts.values()] == [1, 1, 1, 1, 3]
    with capture(model, sites, select={"layers.0": lambda v: v[:2], "layers.*": lambda v: v[:1]}) as acts:
        model(x)
    assert [len(value) for value in acts.values()] == [2, 1, 1, 1, 3]


def test_arguments_of_a_checkpointed_module_have_their_names(model, x):
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    with capture(model, ["layers.0:kw.x", "layers.0:kw.shift"]) as acts:
        model(x)
    assert torch.equal(acts["layers.0:kw.x"], x)


def test_several_patterns_may_name_the_same_site(x):
    model = nn.Sequential(nn.Linear(8, 8))
    with capture(model, ["0", "*", "**.0"]) as acts:
        model(x)
    assert list(acts) == ["0:out"]
    with pytest.raises(InterpError, match=r"nothing at '0', '\*'"), capture(model, ["0", "*"]):
        pass


def test_activations_do_not_keep_the_model_alive(model, x):
    layer = nn.Sequential(nn.Linear(8, 8))
    gone = weakref.ref(layer[0])
    with capture(layer, ["0", ""], stop=True) as acts:
        layer(x)
    del layer
    gc.collect()
    assert gone() is None
    assert len(acts) == 2


def test_values_captured_in_inference_mode_can_be_trained_on(model, x):
    with torch.inference_mode(), capture(model, ["head", "head:in"]) as acts:
        model(x)
    probe = nn.Linear(8, 1)
    probe(acts["head:in"]).sum().backward()
    assert probe.weight.grad.any()
    assert not acts["head"].requires_grad


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
def test_capture_refuses_tensors_that_end_with_a_transform(model, x, transform):
    with pytest.raises(InterpError, match="outside of vmap"), capture(model, "head"):
        transform(model)(x)
    attention = nn.Sequential(SelfAttention())
    for part in ("q", "pattern", "entropy"):
        with pytest.raises(InterpError, match="outside of vmap"), capture(attention, f"0:attn.{part}"):
            transform(attention)(torch.randn(2, 1, 3, 4))


class SelfAttention(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def test_expect_stops_after_the_given_calls_and_raises_when_others_come(model, x):
    shared = nn.Sequential(model.layers[0], model.layers[0], model.layers[1], model.layers[2])
    with capture(shared, ["0", "2"], stop=True) as acts:
        acts.expect(["0", "0#1"])
        assert shared(x) is None
        assert acts.fired == {"0:out", "0:out#1"}
        acts.clear()
        acts.expect(["0", "0#1", "0#2"])
        with pytest.raises(InterpError, match="2:out"):
            shared(x)


def test_sink_is_given_each_value_in_place_of_keeping_it(model, x):
    given = {}
    with capture(model, "layers.*", sink=lambda key, value: given.update({key: value.clone()})) as acts:
        model(x)
        assert acts.fired == {f"layers.{i}:out" for i in range(4)}
        assert len(acts) == 0
    assert torch.equal(given["layers.3:out"], by_hand(model, ["layers.3"], x)["layers.3"][1])


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Record:
    values: dict
    note: str = "note"


class Nested(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.inner = nn.Identity()
        self.output = output

    def forward(self, x):
        return self.output(self.inner(x))


@pytest.mark.parametrize(
    ("output", "site", "expected"),
    [
        (lambda x: (x, x + 1), "", 0),
        (lambda x: (x, x + 1), ":out.1", 1),
        (lambda x: [x, [x + 1, x + 2]], ":out.1.1", 2),
        (lambda x: Pair(x, x + 1), ":out.right", 1),
        (lambda x: {"a": x, 3: x + 3}, ":out.3", 3),
        (lambda x: Record({"deep": (x, x + 4)}), ":out.values.deep.1", 4),
    ],
)
def test_capture_and_edit_reach_into_nested_outputs(output, site, expected):
    model, x = Nested(output), torch.zeros(2)
    with capture(model, site) as acts:
        model(x)
    assert torch.equal(acts[site], x + expected)
    with edit(model, {site: lambda v: v + 10}), capture(model, site) as acts:
        out = model(x)
    assert torch.equal(acts[site], x + expected + 10)
    assert type(out) is type(output(x))


@pytest.mark.parametrize("name", ["values", "0"])
def test_capture_and_edit_know_the_names_of_results_of_torch(x, name):
    class Largest(nn.Module):
        def forward(self, x):
            return x.max(dim=1)

    model = Largest()
    site = f":out.{name}"
    with edit(model, {site: lambda v: v + 1}), capture(model, [site, ":out.indices"]) as acts:
        out = model(x)
    assert out.values.equal(x.max(dim=1).values + 1) and type(out) is type(x.max(dim=1))
    assert acts[site].equal(out.values) and acts[":out.indices"].equal(x.max(dim=1).indices)


def test_keys_and_modules_with_dots_colons_and_hashes_can_be_named(x):
    class Odd(nn.Module):
        def forward(self, x):
            return {"a.b": x, "c:out": x + 1, "d#1": [x + 2]}

    model = nn.ModuleDict({"p:q": Odd(), "r#1": Odd()})
    model.forward = lambda x: (model["p:q"](x), model["r#1"](x))
    sites = ["p:q:out[a.b]", "p:q:out[c:out]", "r#1:out[d#1].0"]
    with capture(model, sites) as acts:
        model(x)
    for i, site in enumerate(sites):
        assert acts[site].equal(x + i) and site in list(acts)
    paths = r"p:q:out\[a\.b\], p:q:out\[c:out\], p:q:out\[d#1\]\.0"
    with pytest.raises(InterpError, match=paths), capture(model, "p:q:out"):
        model(x)


def test_wildcards_pass_over_what_holds_no_tensor_and_report_it(x):
    class Block(nn.Module):
        def forward(self, x, mask=None):
            return {"hidden": x * 2}

    model = nn.Sequential(nn.Linear(8, 8), Block())
    with capture(model, "**") as acts:
        model(x)
    assert list(acts) == ["0:out"]
    assert acts.skipped.keys() == {"1:out", ":out"} and "1:out.hidden" in acts.skipped["1:out"]
    nothing = r"captured nothing at '\*:kw.mask'.*no argument 'mask'"
    with pytest.raises(InterpError, match=nothing), capture(model, "*:kw.mask"):
        model(x)
    with capture(model, ["**:in", "*:kw.mask"]) as acts:
        model(x)
        model[1](x, mask=x)
    assert acts["1:kw.mask#1"].equal(x)
    with pytest.raises(InterpError, match="expected a tensor"), capture(model, ["**", "1"]):
        model(x)
    with capture(model, "**", stop=True) as acts:
        model(x)
    assert list(acts) == ["0:out"]


def test_a_wildcard_takes_no_gradient_of_integers(x):
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    with capture(model, ["*:in", "*"], grad=True) as acts:
        model(torch.arange(4)).sum().backward()
    assert set(acts.gradients) == {"0:out", "1:in", "1:out"} and acts["0:in"].equal(torch.arange(4))


@pytest.mark.parametrize(
    ("output", "site", "paths"),
    [
        (lambda x: {"a": x, "b": (x, x)}, "", r":out\.a, :out\.b\.0, :out\.b\.1"),
        (lambda x: Record({"a": x}), "", r":out\.values\.a"),
        (lambda x: x, ":out.T", ":out"),
        (lambda x: (x, x), ":out.2", r":out\.0, :out\.1"),
    ],
)
def test_capture_and_edit_list_the_paths_when_there_is_no_tensor(output, site, paths):
    model = Nested(output)
    with pytest.raises(InterpError, match=f"expected a tensor; it has {paths}$"), capture(model, site):
        model(torch.zeros(2))
    with pytest.raises(InterpError, match=f"expected a tensor; it has {paths}$"), edit(model, {site: abs}):
        model(torch.zeros(2))


def test_gradients_equal_those_of_autograd(model, x):
    with capture(model, ["layers.1", "layers.2:in"], grad=True) as acts:
        model(x).square().sum().backward()
    value = acts["layers.1"].requires_grad_()
    rest = value
    for layer in model.layers[2:]:
        rest = layer(rest, shift=0.5)
    (expected,) = torch.autograd.grad(model.head(rest).square().sum(), value)
    torch.testing.assert_close(acts.gradients["layers.1:out"], expected)
    torch.testing.assert_close(acts.gradients["layers.2:in"], expected)


def test_gradients_reach_frozen_models(model, x):
    with capture(model, ["layers.1"], grad=True) as trainable:
        model(x).sum().backward()
    model.requires_grad_(False)
    with capture(model, ["layers.1"], grad=True) as frozen:
        model(x).sum().backward()
    assert torch.equal(frozen.gradients["layers.1:out"], trainable.gradients["layers.1:out"])
    with torch.no_grad(), pytest.raises(InterpError, match="no gradient"), capture(model, "head", grad=True):
        model(x)


class Residual(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.drop = nn.Dropout()
        self.inner = nn.Linear(dim, dim)

    def forward(self, x):
        return x + self.inner(self.drop(self.norm(x)).view(-1).mul_(2).view(x.shape))


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("site", ["1.norm:in", "1.norm", "1.drop:in", "1.drop", "1:in", "1", "2:in"])
def test_gradients_are_those_of_an_edit_at_the_site(x, site, trainable):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Residual(), nn.ReLU(inplace=True)).eval()
    shift = torch.zeros(3, 8, requires_grad=True)
    with edit(model, {site: lambda v: v + shift}):
        out = model(x)
        out.square().sum().backward()
    model.requires_grad_(trainable)
    with capture(model, site, grad=True) as acts:
        assert torch.equal(model(x), out)
        acts_out = model(x)
        acts_out.square().sum().backward()
    torch.testing.assert_close(acts.gradients[f"{site}#1"], shift.grad)


def test_gradients_are_found_by_any_name_of_a_site_and_leave_no_hooks(model, x):
    x.requires_grad_()
    with capture(model, ["layers.0", ":in"], grad=True) as acts:
        loss = model(x).sum()
        with pytest.raises(KeyError, match=r"head:out: no such value; there are none yet"):
            acts.gradients["head"]
        loss.backward()
    assert torch.equal(acts.gradients[":in"], x.grad)
    assert acts.gradients["layers.0#0"] is acts.gradients["layers.0:out"] is acts.gradients["layers.0"]
    assert not x._backward_hooks


def test_gradients_of_attention_are_those_of_its_tensors():
    class Attention(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q * 2, k, k)

    model = Attention()
    q, k = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(2))
    with capture(model, [":attn.q", ":attn.z"], grad=True) as acts:
        model(q, k).square().sum().backward()
    torch.testing.assert_close(acts.gradients[":attn.q"], q.grad / 2)
    torch.testing.assert_close(acts.gradients[":attn.z"], 2 * acts[":attn.z"])
    for site in (":attn.pattern", ":attn.entropy"):
        with pytest.raises(InterpError, match="of attention q, k, v or z"), capture(model, site, grad=True):
            model(q, k)


def test_gradients_are_numbers_even_where_they_have_a_graph(model, x):
    x.requires_grad_()
    with capture(model, "layers.0", grad=True) as acts:
        (found,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    assert found.requires_grad
    assert not acts.gradients["layers.0"].requires_grad


def test_gradients_of_complex_numbers_are_kept():
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64), nn.Identity())
    with capture(model, "0", grad=True) as acts:
        out = model(torch.ones(2, 4, dtype=torch.complex64))
        out.abs().square().sum().backward()
    torch.testing.assert_close(acts.gradients["0"], 2 * out.detach())


def test_gradients_of_integers_are_refused():
    model = nn.Embedding(4, 4)
    with (
        pytest.raises(InterpError, match=r"torch\.int64, which has no gradient"),
        capture(model, ":in", grad=True),
    ):
        model(torch.tensor([1, 2]))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_gradients_need_grad_mode(model, x, requires_grad):
    x.requires_grad_(requires_grad)
    with (
        torch.no_grad(),
        pytest.raises(InterpError, match="expected grad mode"),
        capture(model, ":in", grad=True),
    ):
        model(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_capture_sees_a_checkpointed_module_once(model, x, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = model

        def forward(self, x):
            return checkpoint(self.stack.layers[0], x, use_reentrant=reentrant)

    wrapped, seen = Checkpointed(), []
    sites = ["stack.layers.0.inner", "stack.layers.0.inner:in"]
    with capture(wrapped, sites, select=lambda v: [seen.append(1), v][1]) as acts:
        wrapped(x.clone().requires_grad_()).sum().backward()
    assert sorted(acts) == ["stack.layers.0.inner:in", "stack.layers.0.inner:out"]
    assert len(seen) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_edit_is_made_again_when_a_checkpointed_module_is_recomputed(model, x, reentrant):
    block = model.layers[0]

    def gradient(run):
        block.zero_grad()
        with edit(block, {"inner": lambda v: v * 3}):
            run(x.clone().requires_grad_()).sum().backward()
        return block.inner.weight.grad.clone()

    expected = gradient(block)
    assert torch.equal(gradient(lambda v: checkpoint(block, v, use_reentrant=reentrant)), expected)


@pytest.mark.filterwarnings("ignore")
def test_capture_sees_a_model_that_was_compiled_and_run_before(model, x):
    compiled = torch.compile(model, backend="eager")
    expected = compiled(x)
    with capture(compiled, ["layers.*", "head"]) as acts:
        assert torch.equal(compiled(x), expected)
    assert len(acts) == 5
    assert torch.equal(acts["head"], expected)
