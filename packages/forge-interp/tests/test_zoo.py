"""Capture on thirteen families of `transformers`, against plain hooks and what the models say themselves."""

from contextlib import nullcontext
from functools import partial, reduce

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers")

from forge_interp import InterpError, capture, edit

from .zoo import FAMILIES, LENGTH, WITH_SDPA, SdpaLog, hooked, modules, value_of

EVERY = pytest.mark.parametrize("name", FAMILIES)
EVERY_WITH_SDPA = pytest.mark.parametrize("name", WITH_SDPA)
PADDING = pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
TOLERANCE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def made(name, attention=None):
    family = FAMILIES[name]()
    return family, family.build(attention or ("sdpa" if family.attention else "eager"))


def block_sites(family):
    return [f"{tower.blocks}:{part}" for tower in family.towers for part in ("in", "out")]


def first_input(args, kwargs, output):
    return args[0] if args else next(v for v in kwargs.values() if isinstance(v, torch.Tensor))


def first_output(args, kwargs, output):
    return value_of(output)


def plain_hooks(model, family, inputs):
    """Inputs and outputs of all blocks by site, and the model's own output."""
    names = modules(model, *(tower.blocks for tower in family.towers))
    with hooked(model, names, first_input) as ins, hooked(model, names, first_output) as outs:
        output = model(**inputs)
    seen = {f"{n}:in": value for n, value in ins.items()} | {f"{n}:out": value for n, value in outs.items()}
    return seen, output


def tensors_of(output):
    """All tensors of an output, whatever it is, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, (tuple, list)):
        return [tensor for one in output for tensor in tensors_of(one)]
    return [tensor for one in getattr(output, "values", tuple)() for tensor in tensors_of(one)]


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(got[key], value), key


@EVERY
def test_capture_equals_hidden_states(name):
    family, model = made(name)
    with capture(model, block_sites(family)) as acts:
        output = model(**family.inputs(True), output_hidden_states=True)
    for tower in (tower for tower in family.towers if tower.states):
        *states, final = reduce(getattr, tower.states.split("."), output)
        blocks = modules(model, tower.blocks)
        if tower.begins_with_input:
            expected = {f"{block}:in": state for block, state in zip(blocks, states, strict=True)}
            expected |= {f"{block}:out": state for block, state in zip(blocks, states[1:], strict=False)}
        else:
            expected = {f"{block}:out": state for block, state in zip(blocks, states, strict=True)}
        assert_equal({key: acts[key] for key in expected}, expected)
        last = acts[f"{blocks[-1]}:out"]
        assert torch.equal(model.get_submodule(tower.norm)(last) if tower.norm else last, final)


@PADDING
@EVERY_WITH_SDPA
def test_attention_equals_the_call(name, padded):
    family, model = made(name)
    inputs = family.inputs(padded)
    names = modules(model, *family.attention)
    parts = ("q", "k", "v", "raw", "scores", "z")
    sites = [f"{glob}:attn.{part}" for glob in family.attention for part in parts]
    order = hooked(model, names, first_output)
    with order as ran, SdpaLog() as log, capture(model, sites) as acts:
        model(**inputs)
    assert len(acts) == len(log.calls) * len(parts) == len(names) * len(parts)
    for module, call in zip(ran, log.calls, strict=True):
        q, k, v, raw, scores, z = (acts[f"{module}:attn.{part}"] for part in parts)
        assert torch.equal(q, call.query) and torch.equal(z, call.output)
        groups = getattr(model.get_submodule(module), "num_key_value_groups", 1)
        for got, given in ((k, call.key), (v, call.value)):
            assert got.shape[1] == q.shape[1] // groups
            assert torch.equal(got.repeat_interleave(given.shape[1] // got.shape[1], 1), given)
        torch.testing.assert_close(raw.double(), call.raw, **TOLERANCE)
        torch.testing.assert_close(scores.double(), call.scores, **TOLERANCE)


@PADDING
@EVERY_WITH_SDPA
def test_streaming_statistics_equal_those_of_the_pattern(name, padded):
    family, model = made(name)
    parts = ("scores", "pattern", "entropy", "sink")
    sites = [f"{glob}:attn.{part}" for glob in family.attention for part in parts]
    with capture(model, sites) as acts:
        model(**family.inputs(padded))
    for module in modules(model, *family.attention):
        scores, pattern, entropy, sink = (acts[f"{module}:attn.{part}"] for part in parts)
        seen = scores > torch.finfo(scores.dtype).min / 2
        rows = seen.any(-1)
        assert rows.any() and (padded or rows.all())
        assert entropy[~rows].isnan().all()
        torch.testing.assert_close(entropy[rows], torch.special.entr(pattern).sum(-1)[rows], **TOLERANCE)
        first = seen.any(-2).float().argmax(-1)[..., None, None].expand_as(pattern[..., :1])
        expected = pattern.gather(-1, first)[..., 0]
        known = rows & sink.isfinite()
        assert known.any() and torch.equal(sink.isfinite(), rows & seen.gather(-1, first)[..., 0])
        torch.testing.assert_close(sink[known], expected[known], **TOLERANCE)


@EVERY
def test_stop_gives_the_values_of_a_full_run(name):
    family, model = made(name)
    sites = block_sites(family) + [f"{glob}:attn.pattern" for glob in family.attention]
    with capture(model, sites) as full:
        assert model(**family.inputs(True)) is not None
    with capture(model, sites, stop=True) as acts:
        assert model(**family.inputs(True)) is None
    assert_equal(dict(acts), dict(full))


@EVERY
def test_stop_leaves_out_what_comes_after_the_last_site(name):
    family, model = made(name)
    first, second = modules(model, family.towers[-1].blocks)[0], modules(model, family.towers[-1].blocks)[-1]
    with hooked(model, [first, second], first_output) as ran, capture(model, f"{first}:in", stop=True):
        model(**family.inputs(False))
    assert ran == {}


@EVERY
def test_outputs_inside_a_capture_are_those_without_it(name):
    family, model = made(name)
    expected = tensors_of(model(**family.inputs(True)))
    sites = block_sites(family) + [f"{glob}:attn.pattern" for glob in family.attention]
    with capture(model, sites):
        got = tensors_of(model(**family.inputs(True)))
    assert len(expected) > 0
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_each_step_of_generation_is_a_call_of_its_own(name):
    family, model = made(name)
    attention = modules(model, *family.attention)[-1]
    prompt = family.inputs(False)
    site = f"{attention}:attn.pattern"
    with capture(model, [site, ":out.logits"]) as acts:
        written = model.generate(**prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    with capture(model, [f"{site}#0", f"{site}#2"]) as some:
        model.generate(**prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    with capture(model, site) as full:
        model(input_ids=written[:, :-1])
    assert_equal(dict(some), {key: acts[key] for key in (site, f"{site}#2")})
    calls = ["", "#1", "#2", "#3"]
    assert list(acts) == [f"{part}{call}" for call in calls for part in (site, ":out.logits")]
    for call, step in enumerate(range(LENGTH, LENGTH + 3), start=1):
        # transformers hands over one query with grouped heads as [B, K, N / K, H]
        got = acts[f"{site}#{call}"].flatten(1, 2)
        torch.testing.assert_close(got, full[site][:, :, step, : step + 1], **TOLERANCE)


@EVERY_WITH_SDPA
def test_edits_that_put_back_what_they_found_leave_the_output_as_it_was(name):
    family, model = made(name)
    inputs = family.inputs(True)
    expected = tensors_of(model(**inputs))[0]
    for part in ("q", "k", "v", "z", "raw", "scores", "pattern"):
        found = []
        with edit(model, {f"{glob}:attn.{part}": partial(put_back, found) for glob in family.attention}):
            got = tensors_of(model(**inputs))[0]
        assert len(found) == len(modules(model, *family.attention))
        written_out = part in ("raw", "scores", "pattern")  # then softmax(scores) V is, and rounds otherwise
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 if written_out else 0)


def put_back(found, value):
    found.append(value)
    return value.clone()


def leftovers(model):
    """Whatever a capture could leave behind in a model and in torch."""
    hooks = [
        (name, key, dict(value))
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if "hooks" in key and isinstance(value, dict) and value
    ]
    shadowed = [name for name, module in model.named_modules() if "forward" in vars(module)]
    return hooks, shadowed, F.scaled_dot_product_attention, torch._C._len_torch_function_stack()


@pytest.mark.parametrize("ending", ["normal", "stop", "raise_in_model", "raise_in_body", "captured_nothing"])
@EVERY
def test_nothing_is_left_behind(name, ending):
    family, model = made(name)
    sites = block_sites(family) + [f"{glob}:attn.z" for glob in family.attention]
    inputs = family.inputs(False)
    model(**inputs)  # transformers puts hooks of its own into some models on their first call
    before = leftovers(model)
    attention = modules(model, *family.attention or [family.towers[-1].blocks])[-1]
    failing = (
        model.get_submodule(attention).register_forward_hook(fail) if ending == "raise_in_model" else None
    )
    error = {"raise_in_model": Broken, "raise_in_body": Broken, "captured_nothing": InterpError}.get(ending)
    with pytest.raises(error) if error else nullcontext(), capture(model, sites, stop=ending == "stop"):
        if ending != "captured_nothing":
            model(**inputs)
        if ending == "raise_in_body":
            raise Broken
    if failing:
        failing.remove()
    assert leftovers(model) == before
    with capture(model, sites) as acts:
        expected, _ = plain_hooks(model, family, inputs)
    assert_equal({key: acts[key] for key in expected}, expected)


class Broken(Exception):
    pass


def fail(*_):
    raise Broken


class InPlace(nn.Module):
    """Each layer changes the output of the one before."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x):
        hidden = self.one(x)
        self.act(hidden)
        hidden += self.two(x).mul_(2)
        return hidden.add_(1)


def test_later_in_place_operations_leave_captured_values_alone():
    torch.manual_seed(0)
    model, x = InPlace(), torch.randn(8, 4)
    with capture(model, ["one", "two", "act:in", "act", ":out"]) as acts:
        output = model(x)
    one, two = (F.linear(x, layer.weight, layer.bias) for layer in (model.one, model.two))
    assert (one < 0).any()
    expected = {"one:out": one, "two:out": two, "act:in": one, "act:out": one.relu(), ":out": output.clone()}
    output.zero_()
    assert_equal(dict(acts), expected)
