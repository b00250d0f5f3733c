import copy
import gc
import pickle
import sys
import threading
import weakref
from contextlib import ExitStack, contextmanager

import pytest
import torch
import torch.nn.functional as F
from forge_interp import InterpError, capture, each_attention, edit
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, dim=4):
        super().__init__()
        self.q = nn.Linear(dim, dim)

    def forward(self, x):
        q = self.q(x)[None]
        return F.scaled_dot_product_attention(q, q, q)[0]


class Halving(nn.Module):
    """Calls itself: the outer call has attention before and after the inner one."""

    def forward(self, x, depth=2):
        x = F.scaled_dot_product_attention(x, x, x)
        if depth:
            x = self(x / 2, depth - 1)
        return F.scaled_dot_product_attention(x, x, x) + depth


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


@pytest.fixture
def x():
    return torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def eager_switching():
    """Threads take turns after a few operations."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(*functions):
    errors = []

    def run(function):
        try:
            function()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def state(model):
    """All that a `with` may leave behind."""
    hooks = [
        (dict(m._forward_hooks), dict(m._forward_pre_hooks), m.__dict__.get("forward"))
        for m in model.modules()
    ]
    stance = sys.modules["torch._dynamo"].eval_frame._stance.stance if "torch._dynamo" in sys.modules else ""
    return hooks, torch.overrides._get_current_function_mode_stack(), F.scaled_dot_product_attention, stance


def test_calls_of_a_module_that_calls_itself_are_numbered_by_their_beginning(x):
    model = Halving()
    with capture(model, [":in", ":out", ":attn.q"]) as acts:
        out = model(x)
    assert {key for key in acts if ":in" in key} == {":in", ":in#1", ":in#2"}
    assert torch.equal(acts[":in"], x)
    assert torch.equal(acts[":out"], out)
    for call, depth in ((0, 2), (1, 1), (2, 0)):
        assert torch.equal(model(acts[f":in#{call}"], depth), acts[f":out#{call}"])
    assert torch.equal(acts[":attn.q#2"], acts[":in#2"])
    assert len([key for key in acts if "attn" in key]) == 6


def test_edit_of_one_call_of_a_module_that_calls_itself(x):
    model = Halving()
    inner = model(x, 0) * 0 + 5
    with edit(model, {":out#1": lambda v: v * 0 + 5}):
        out = model(x, 1)
    assert torch.equal(out, F.scaled_dot_product_attention(inner, inner, inner) + 1)


def test_a_call_that_failed_keeps_its_number(model, x):
    with capture(model, ["2:in", "2", "0"]) as acts:
        with edit(model, {"2": lambda v: 1 / 0}), pytest.raises(ZeroDivisionError):
            model(x)
        out = model(x)
    assert list(acts) == ["0:out", "2:in", "0:out#1", "2:in#1", "2:out#1"]
    assert torch.equal(acts["2#1"], out)


def test_a_model_run_by_two_threads_has_its_calls_told_apart(model, eager_switching):
    with capture(model, ["0:in", "0", "2:in", "2"]) as acts:

        def run(size):
            for i in range(20):
                model(torch.full((size, 4), float(i)))

        in_threads(lambda: run(2), lambda: run(3))
    assert {key.partition("#")[0] for key in acts} == {"0:in", "0:out", "2:in", "2:out"}
    assert len(acts) == 4 * 40
    for layer in (0, 2):
        for call in range(40):
            torch.testing.assert_close(model[layer](acts[f"{layer}:in#{call}"]), acts[f"{layer}#{call}"])


def test_two_threads_capture_their_own_models(eager_switching):
    def run(size):
        model, x = nn.Sequential(Attention()), torch.randn(size, 4)
        for _ in range(20):
            with torch.no_grad(), capture(model, ["0:attn.z", "0"]) as acts:
                out = model(x)
            assert list(acts) == ["0:attn.z", "0:out"]
            assert torch.equal(acts["0:attn.z"][0], out)

    in_threads(lambda: run(3), lambda: run(4))


def test_attention_in_another_thread_is_seen_and_edited(x):
    model, outs = nn.Sequential(Attention()), []
    expected = model(x[0])
    with edit(model, {"0:attn.z": lambda z: z * 2}), capture(model, "0:attn.z", before_edits=True) as acts:

        def run():
            outs.append(model(x[0]))
            assert torch.overrides._get_current_function_mode_stack() == []

        in_threads(run)
    assert torch.equal(outs[0], expected * 2)
    assert torch.equal(acts["0:attn.z"][0], expected)


def replicate(module):
    """What `nn.DataParallel` runs on each device."""
    replica = module._replicate_for_data_parallel()
    for name, weight in module.named_parameters(recurse=False):
        setattr(replica, name, weight.detach())
    for name, child in module.named_children():
        replica._modules[name] = replicate(child)
    return replica


def test_replicas_of_data_parallel_count_as_calls_of_the_module(model, x):
    outs = {}
    with capture(model, "0") as acts, edit(model, {"2": lambda v: v + 1}):
        replicas = [replicate(model), replicate(model)]
        in_threads(*(lambda i=i: outs.update({i: replicas[i](x + i)}) for i in (0, 1)))
    assert set(acts) == {"0:out", "0:out#1"}
    for i in (0, 1):
        torch.testing.assert_close(outs[i], model(x + i) + 1)


def backward(loss, weights):
    loss.backward()


def backward_by_grad(loss, weights):
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        weight.grad = gradient


def backward_elsewhere(loss, weights):
    in_threads(loss.backward)


@pytest.mark.parametrize("site", ["0:attn.q", "0:attn.pattern", "0:attn.z", "0.q", "0", "0:in", "0.q#0"])
@pytest.mark.parametrize(
    ("reentrant", "differentiate"),
    [
        (False, backward),
        (False, backward_by_grad),
        (False, backward_elsewhere),
        (True, backward),
        (True, backward_elsewhere),
    ],
)
def test_edits_are_made_again_when_checkpointing_recomputes(x, site, reentrant, differentiate):
    torch.manual_seed(0)
    plain = nn.Sequential(Attention(), nn.Linear(4, 4))
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    wrapped = nn.Sequential(checkpoint_wrapper(plain[0], checkpoint_impl=kind), plain[1])

    def gradients(model, differentiate):
        plain.zero_grad()
        with edit(model, {site: lambda v: v * 0.5}), capture(model, ["0.q", "0:attn.q", "0"]) as acts:
            differentiate(model(x[0].clone().requires_grad_()).square().sum(), list(model.parameters()))
        assert sorted(acts) == ["0.q:out", "0:attn.q", "0:out"]
        return [weight.grad for weight in plain.parameters()]

    expected = gradients(plain, backward)
    torch.testing.assert_close(gradients(wrapped, differentiate), expected, rtol=0, atol=0)


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant=False):
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize(
    ("reentrant", "differentiate"),
    [
        (False, backward),
        (False, torch.autograd.backward),
        (False, backward_by_grad),
        (True, torch.autograd.backward),
        (True, backward_elsewhere),
    ],
)
def test_backward_is_refused_when_it_recomputes_attention_without_its_edit(x, reentrant, differentiate):
    model = nn.Sequential(Checkpointed(Attention(), reentrant))
    says = r"edit of '0:attn.q': activation checkpointing"

    def loss():
        return model(x[0].clone().requires_grad_()).sum()

    def differentiated(value):
        if differentiate is torch.autograd.backward:
            differentiate(value)
        else:
            differentiate(value, list(model.parameters()))

    with edit(model, {"0:attn.q": lambda v: v * 2}):
        edited = loss()
        with pytest.raises(InterpError, match=says):
            differentiated(edited)
        edited = loss()
    with pytest.raises(InterpError, match=says):
        differentiated(edited)
    with edit(model, {"0.inner:attn.q": lambda v: v * 2}):
        differentiated(loss())
    with capture(model, "0:attn.q") as acts:
        differentiated(loss())
    assert list(acts) == ["0:attn.q"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_is_refused_when_checkpoints_are_nested_around_the_edited_module(x, reentrant):
    model = Checkpointed(nn.Sequential(Checkpointed(Attention(), reentrant)), reentrant)
    with edit(model, {"inner:attn.q": lambda v: v * 2}):
        loss = model(x[0].clone().requires_grad_()).sum()
        with pytest.raises(InterpError, match="activation checkpointing"):
            loss.backward()


def test_backward_is_allowed_beside_a_frozen_part_with_edited_attention(x):
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention()
            self.head = nn.Linear(4, 1)

        def forward(self, x):
            with torch.no_grad():
                seen = self.attention(x)
            return self.head(seen)

    model = Frozen()
    with edit(model, {"attention:attn.q": lambda v: v * 2}):
        model(x[0]).sum().backward()
    assert model.head.weight.grad.any()
    model.requires_grad_(False)
    with edit(model, {":attn.q": lambda v: v * 2}):
        assert not model(x[0]).requires_grad


def test_edit_of_a_later_call_is_refused_in_recomputation(x):
    layer = nn.Linear(4, 4)
    model = Checkpointed(nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh()))
    with pytest.raises(InterpError, match="does not tell which call"), edit(model, {"inner.0#1": torch.relu}):
        model(x.clone().requires_grad_()).sum().backward()


def test_edit_of_a_call_that_never_was_is_not_made_in_recomputation(x):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model = nn.Sequential(layer, Checkpointed(nn.Sequential(nn.Linear(4, 4), nn.Tanh())))

    def gradient(edits):
        model.zero_grad()
        with pytest.raises(InterpError, match=r"edited nothing at '.*#3'"), edit(model, edits):
            model(x).sum().backward()
        return model[1].inner[0].weight.grad

    plain = gradient({"0#3": torch.zeros_like})
    assert torch.equal(gradient({"1.inner.0#3": torch.zeros_like}), plain)


def test_a_forward_in_a_custom_backward_is_a_call_as_any_other(model, x):
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            return model(gradient)

    with capture(model, "0") as acts, edit(model, {"0#1": lambda v: v * 0}):
        out = Through.apply(x.requires_grad_()) + model(x)
        out.sum().backward()
    assert set(acts) == {"0:out", "0:out#1"} and not acts["0#1"].any()


def test_capture_opened_in_a_backward_pass_sees_what_runs_there(model, x):
    seen = []

    def look(gradient):
        with capture(model, ["0", "2"]) as acts:
            model(x)
        seen.append(list(acts))

    y = torch.zeros(1, requires_grad=True)
    z = y * 2
    z.register_hook(look)
    z.backward()
    assert seen == [["0:out", "2:out"]]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("options", [{}, {"stop": True}, {"sink": lambda key, value: None}])
def test_a_copy_made_inside_the_with_is_a_model_of_its_own(model, x, clone, options):
    expected = model(x)
    with edit(model, {"0": lambda v: v * 2}), capture(model, ["0", "0:in"], **options) as acts:
        model(x)
        twin = clone(model)
        seen = acts.fired
        assert torch.equal(twin(x), expected)
        assert acts.fired == seen
    with torch.no_grad():
        for weight in twin.parameters():
            weight.zero_()
    assert not twin(x).any()
    assert torch.equal(clone(twin)(x), twin(x))
    torch.compiler.reset()
    assert not torch.compile(twin, backend="eager", fullgraph=True)(x).any()
    assert torch.equal(model(x), expected)
    with capture(twin, ["0", "2"], stop=True) as acts:
        twin(x)
    assert list(acts) == ["0:out", "2:out"]


def test_a_copy_keeps_a_forward_that_the_model_had_of_its_own(model, x):
    model.forward = Doubling(model[0])
    with capture(model, "0", sink=lambda key, value: None):
        twin, same = copy.deepcopy(model), model(x)
    assert torch.equal(twin(x), same)
    assert isinstance(model.forward, Doubling)


class Doubling:
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return self.layer(x) * 2


SEEN = []
CONTEXTS = {
    "capture": lambda m: capture(m, ["0:attn.z", "0", "0:in"]),
    "stop": lambda m: capture(m, ["1", "0:attn.q"], stop=True),
    "sink": lambda m: capture(m, ["0", "0:in"], sink=lambda key, value: SEEN.append(key)),
    "edit": lambda m: edit(m, {"0": lambda v: v + 1, "0:attn.q": lambda v: v * 2}),
    "look": lambda m: each_attention(m, "0", lambda name, call: SEEN.append(name)),
}


@pytest.mark.parametrize("second", CONTEXTS)
@pytest.mark.parametrize("first", CONTEXTS)
def test_contexts_closed_in_the_order_of_their_opening_leave_nothing(x, first, second):
    model = nn.Sequential(Attention(), nn.Linear(4, 4))
    before, plain = state(model), model(x[0])
    with CONTEXTS[second](model):
        expected = model(x[0])
    outer, inner = ExitStack(), ExitStack()
    outer.enter_context(CONTEXTS[first](model))
    acts = inner.enter_context(CONTEXTS[second](model))
    model(x[0])
    outer.close()
    if acts is not None:
        acts.clear()
    SEEN.clear()
    out = model(x[0])
    if second in ("capture", "stop"):
        assert len(acts) == {"capture": 3, "stop": 2}[second]
    assert {"sink": ["0:in", "0:out"], "look": ["0#1"]}.get(second, []) == SEEN
    assert out is None if second == "stop" else torch.equal(out, expected)
    inner.close()
    assert state(model) == before
    assert torch.equal(model(x[0]), plain)


def test_modules_that_say_they_are_equal_are_told_apart(x):
    class Scale(nn.Module):
        def __init__(self, by):
            super().__init__()
            self.by = by

        def __eq__(self, other):
            return isinstance(other, Scale)

        def __hash__(self):
            return 1

        def forward(self, x):
            return x * self.by

    model = nn.Sequential()
    for by in (2, 3):
        model.add_module(str(by), Scale(by))
    with capture(model, ["2"]) as first, capture(model, ["3"]) as second:
        model(x)
    assert torch.equal(first["2"], x * 2)
    assert torch.equal(second["3"], x * 6)


def test_a_scripted_module_is_refused_each_time_and_nothing_stays(model, x):
    with pytest.warns((FutureWarning, DeprecationWarning), match=r"torch\.jit"):
        model[1] = torch.jit.script(nn.Sequential(nn.ReLU()))
    before = state(model)
    for _ in range(2):
        with pytest.raises(InterpError, match="is TorchScript"), capture(model, ["0", "1"]):
            model(x)
        assert state(model) == before
    with capture(model, ["0", "2"]) as acts:
        model(x)
    assert len(acts) == 2


def test_hooks_of_others_stay_and_run_in_their_place(model, x):
    ran = []
    model[0].register_forward_hook(lambda module, args, output: ran.append("first"))
    with capture(model, "0", select=lambda v: [ran.append("ours"), v][1]):
        handle = model[0].register_forward_hook(lambda module, args, output: ran.append("last"))
        model(x)
    model(x)
    handle.remove()
    assert ran == ["first", "ours", "last", "first", "last"]
    assert len(model[0]._forward_hooks) == 1


def test_a_model_put_back_together_inside_the_with_loses_its_hooks(model, x):
    gone = weakref.ref(model[0])
    with capture(model, "0"):
        model(x)
        model[0] = nn.Identity()
    assert not model[0]._forward_hooks
    gc.collect()
    assert gone() is None


def compiled(model, counts):
    def backend(graph, inputs):
        counts.append(1)
        return graph.forward

    torch.compiler.reset()
    return torch.compile(model, backend=backend)


def test_a_compiled_model_runs_eagerly_until_the_last_with_is_left(model, x):
    counts = []
    fast = compiled(model, counts)
    outer, inner = ExitStack(), ExitStack()
    outer.enter_context(capture(fast, "0"))
    inner.enter_context(capture(fast, "2"))
    fast(x)
    outer.close()
    fast(x)
    assert counts == []
    inner.close()
    fast(x)
    assert counts == [1]


def test_a_compiled_model_is_not_compiled_anew_afterwards(model, x):
    counts = []
    fast = compiled(model, counts)
    expected = fast(x)
    for _ in range(2):
        with capture(fast, ["0", "2"], stop=True) as acts, edit(fast, {"0": lambda v: v + 1}):
            fast(x)
        assert torch.equal(fast(x), expected)
    assert len(acts) == 2
    assert counts == [1]


def test_what_the_user_told_the_compiler_holds_again_afterwards(model, x):
    counts = []
    fast = compiled(model, counts)
    with torch.compiler.set_stance("force_eager"):
        with capture(fast, "0"):
            fast(x)
        fast(x)
    assert counts == []
    fast(x)
    assert counts == [1]


@contextmanager
def entered_without_compiler(context):
    """A `with` that began before torch._dynamo was imported."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.delitem(sys.modules, "torch._dynamo", raising=False)
        value = stack.enter_context(context)
        patch.undo()
        yield value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("name", ["", "0"])
@pytest.mark.parametrize("make", [lambda m: capture(m, ["0", ":out"]), lambda m: edit(m, {"0": torch.relu})])
def test_a_model_compiled_for_the_first_time_inside_the_with_is_refused(model, x, name, fullgraph, make):
    expected, before = model(x), state(model)
    torch.compiler.reset()
    model.get_submodule(name).compile(backend="eager", fullgraph=fullgraph)
    with (
        pytest.raises(InterpError, match=r"expected torch\.compile before the with"),
        entered_without_compiler(make(model)),
    ):
        model(x)
    assert state(model) == before
    assert torch.equal(model(x), expected)
    with capture(model, ["0", ":out"]) as acts:
        model(x)
    assert torch.equal(acts[":out"], expected)


def test_a_later_with_has_compiled_models_run_eagerly_though_an_earlier_one_could_not(model, x):
    counts = []
    fast = compiled(model, counts)
    with entered_without_compiler(capture(model, "0")) as acts, capture(model, "2") as late:
        fast(x)
    assert list(acts) == ["0:out"]
    assert list(late) == ["2:out"]
    assert counts == []
    fast(x)
    assert counts == [1]
