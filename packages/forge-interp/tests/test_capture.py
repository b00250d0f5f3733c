from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from forge_interp import InterpError, capture, edit
from torch import nn
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
        with pytest.raises(KeyError, match=r"layers\.1:in: not captured; there are layers"):
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
    with pytest.raises(InterpError, match="select for"), capture(model, "head", select={"layers.*": abs}):
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


@pytest.mark.parametrize("output", [lambda x: {"a": x, "b": (x, x)}, lambda x: Record({"a": x})])
def test_capture_lists_the_paths_when_the_output_is_no_tensor(output):
    with (
        pytest.raises(InterpError, match=r"expected a tensor; it has :out\.(a|values\.a)"),
        capture(Nested(output), ""),
    ):
        Nested(output)
        model = Nested(output)
        with capture(model, ""):
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


@pytest.mark.parametrize("reentrant", [False, True])
def test_capture_sees_a_checkpointed_module_once(model, x, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = model

        def forward(self, x):
            return checkpoint(self.stack.layers[0], x, use_reentrant=reentrant)

    wrapped = Checkpointed()
    with capture(wrapped, "stack.layers.0.inner") as acts:
        wrapped(x.clone().requires_grad_()).sum().backward()
    assert list(acts) == ["stack.layers.0.inner:out"]


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
