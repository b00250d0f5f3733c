"""Attention of models of transformers as they decode, in bfloat16, and where it cannot be known."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers
from forge_interp.attention.call import AttentionCall
from forge_interp.attention.statistics import attention_statistics
from forge_interp.errors import InterpError
from forge_interp.hooks.capture import capture, each_attention

from .zoo import FAMILIES, WITH_SDPA

HEADS, PADS, LENGTH = 4, 3, 9
DECODERS = ("llama", "mixtral", "gemma3", "gpt2")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def tokens_and_mask(padded: bool) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(3, 98, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, : PADS * padded] = 0
    return tokens, mask


def observed(model: nn.Module, modules: tuple[str, ...], run: Callable) -> list[AttentionCall]:
    """The calls, in order; their tensors are not changed later by these models."""
    calls = []
    with each_attention(model, modules, lambda _, call: calls.append(call)):
        run()
    return calls


def in_steps(model: nn.Module, padded: bool, num_new: int, static: bool, **options) -> Callable:
    """Run all but `num_new` tokens, and return what runs those."""
    tokens, mask = tokens_and_mask(padded)
    slots = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 4) if static else None
    told = {"attention_mask": mask[:, :-num_new]} if padded else {}
    cache = model(tokens[:, :-num_new], past_key_values=slots, use_cache=True, **told).past_key_values
    told = {"attention_mask": mask} if padded else {}
    return lambda: model(tokens[:, -num_new:], past_key_values=cache, **told, **options)


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("num_new", [1, 4], ids=["token", "chunk"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", DECODERS)
def test_pattern_with_a_cache_equals_the_eager_weights(name, padded, num_new, static):
    family = FAMILIES[name]()
    model = family.build("sdpa")
    calls = observed(model, family.attention, in_steps(model, padded, num_new, static))
    eager = in_steps(family.build("eager"), padded, num_new, static, output_attentions=True)().attentions
    assert len(calls) == len(eager) == 2
    for call, weights in zip(calls, eager, strict=True):
        call.check()
        pattern = call.read("pattern", 2**30)
        assert pattern.numel() == weights.numel()
        torch.testing.assert_close(pattern.reshape(weights.shape), weights, rtol=0, atol=1e-5)
        expected = torch.special.entr(weights).sum(-1)
        entropy = call.read("entropy", 0).reshape(expected.shape)
        torch.testing.assert_close(entropy, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("num_new", [1, 4], ids=["token", "chunk"])
@pytest.mark.parametrize("name", DECODERS)
def test_statistics_with_a_cache_are_those_of_the_last_queries_of_one_pass(name, num_new, static):
    family = FAMILIES[name]()
    model = family.build("sdpa")
    tokens, mask = tokens_and_mask(True)
    steps = observed(model, family.attention, in_steps(model, True, num_new, static))
    whole = observed(model, family.attention, lambda: model(tokens, attention_mask=mask))
    for step, once in zip(steps, whole, strict=True):
        for statistic in ("entropy", "previous", "lag.2"):
            expected = once.read(statistic, 0)[..., -num_new:]
            found = step.read(statistic, 0).reshape(expected.shape)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, equal_nan=True)
            assert not expected.isnan().any()


def test_statistics_of_a_left_padded_text_are_those_of_the_text_alone():
    family = FAMILIES["llama"]()
    model = family.build("sdpa")
    tokens, mask = tokens_and_mask(True)
    names = ["entropy", "sink", "previous"]
    repeated = torch.cat([tokens[:, :5], tokens[:, PADS:5], tokens[:, PADS:5]], 1)
    padded = observed(model, family.attention, lambda: model(repeated, attention_mask=mask))
    alone = observed(model, family.attention, lambda: model(repeated[1:, PADS:]))
    for many, one in zip(padded, alone, strict=True):
        found = attention_statistics(many, names)
        for name, expected in attention_statistics(one, names).items():
            assert expected.isfinite().any()
            torch.testing.assert_close(found[name][1:, :, PADS:], expected, atol=1e-5, rtol=0, equal_nan=True)
            assert found[name][1, :, :PADS].isnan().all()


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", WITH_SDPA)
def test_gate_passes_in_bfloat16(name, padded):
    family = FAMILIES[name]()
    model = family.build("sdpa").bfloat16()
    inputs = {
        key: value.bfloat16() if value.is_floating_point() else value
        for key, value in family.inputs(padded).items()
    }
    calls = observed(model, family.attention, lambda: model(**inputs))
    assert calls and all(call.output.dtype == torch.bfloat16 for call in calls)
    for call in calls:
        call.check()
        assert call.read("pattern", 2**30).dtype == torch.float32


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "clip"])
def test_gate_passes_under_autocast(name):
    family = FAMILIES[name]()
    model = family.build("sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        calls = observed(model, family.attention, lambda: model(**family.inputs(True)))
    assert calls
    for call in calls:
        call.check()


def test_soft_capped_scores_are_those_after_the_cap():
    family = FAMILIES["gemma2"]()
    inputs, model = family.inputs(False), family.build("eager")
    cap = 0.5
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = cap
    sites = [f"model.layers.*.self_attn:attn.{name}" for name in ("scores", "pattern")]
    with torch.no_grad(), capture(model, sites) as acts:
        weights = model(**inputs, output_attentions=True).attentions
    assert acts["model.layers.0.self_attn:attn.scores"].max() <= cap
    for i in range(2):
        torch.testing.assert_close(acts[f"model.layers.{i}.self_attn:attn.pattern"], weights[i])
    with pytest.raises(ValueError, match="does not support"):
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_dropout_is_an_error_that_names_eval(name):
    family = FAMILIES[name]()
    model = family.build("sdpa").train()
    for part in ("pattern", "entropy"):
        sites = [f"{module}:attn.{part}" for module in family.attention]
        with pytest.raises(InterpError, match=r"dropout 0.1.*model\.eval\(\)"), capture(model, sites):
            model(**family.inputs(False))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_pattern_of_a_float64_model_is_that_of_the_softmax_that_it_takes_in_float32(name):
    family = FAMILIES[name]()
    model = family.build("eager").double()
    tokens, _ = tokens_and_mask(False)
    with capture(model, [f"{module}:attn.pattern" for module in family.attention]) as acts:
        weights = model(tokens, output_attentions=True).attentions
    assert len(acts) == len(weights) == 2
    for pattern, expected in zip(acts.values(), weights, strict=True):
        torch.testing.assert_close(pattern.double(), expected, rtol=0, atol=1e-7)
