"""What holds for each family of one table: blocks are as plain hooks see them, attention as eager models."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from forge_interp import InterpError, capture

from .families import MORE, SLOW, TABLE, blocks, made
from .zoo import FAMILIES, hooked, value_of

TOLERANCE = {"rtol": 0, "atol": 1e-5}
NO_ATTENTION = ("mamba", "Mamba2")
"""They compute none, which is an error."""
EVERY = pytest.mark.parametrize(
    "name", [*FAMILIES, *MORE, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
PADDING = pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def first_input(args: Any, kwargs: Any, output: Any) -> Tensor:
    return args[0] if args else next(v for v in kwargs.values() if isinstance(v, Tensor))


def weights_in(args: Any, kwargs: Any, output: Any) -> Tensor:
    """[B, N, T, S]: the last of what a module of attention returns."""
    return [item for item in output if isinstance(item, Tensor) and item.ndim == 4][-1]


@PADDING
@EVERY
def test_blocks_equal_plain_hooks_of_the_same_run(name: str, padded: bool):
    model = made(name)
    names = blocks(name, model)
    assert len(names) >= 2
    with (
        capture(model, [f"{block}:{part}" for block in names for part in ("in", "out")]) as acts,
        hooked(model, names, first_input) as ins,
        hooked(model, names, lambda args, kwargs, output: value_of(output)) as outs,
    ):
        model(**TABLE[name]().inputs(padded))
    expected = {f"{block}:in": value for block, value in ins.items()}
    expected |= {f"{block}:out": value for block, value in outs.items()}
    assert acts.keys() == expected.keys() and len(acts) == 2 * len(names)
    for site, value in expected.items():
        assert torch.equal(acts[site], value), site


WAYS = [("sdpa", False), ("sdpa", True), ("eager", True)]
"""Attention, and whether it is padded: without a mask SDPA is told to be causal."""


@pytest.mark.parametrize(
    ("name", "attention", "padded"),
    [
        *((name, *way) for name in [*FAMILIES, *MORE] for way in WAYS),
        *(pytest.param(name, "sdpa", padded, marks=pytest.mark.slow) for name in SLOW for padded in (0, 1)),
    ],
)
def test_attention_equals_the_weights_of_the_eager_model(name: str, attention: str, padded: bool):
    model, eager, inputs = made(name, attention), made(name, "eager"), TABLE[name]().inputs(padded)
    sites = [f"**:attn.{part}" for part in ("pattern", "v", "z")]
    if name in NO_ATTENTION:
        with pytest.raises(InterpError, match="scaled_dot_product_attention"), capture(model, sites):
            model(**inputs)
        return
    with capture(model, sites) as acts:
        model(**inputs)
    found = [site.partition(":")[0] for site in acts if site.endswith("pattern")]
    calling = [n for n in blocks(name, model) if any(of.startswith(n) for of in found)]
    assert len(calling) == (1 if name == "RecurrentGemma" else len(blocks(name, model)))
    with hooked(eager, found, weights_in) as weights:
        eager(**inputs, output_attentions=True)
    for module in found:
        pattern, v, z = (acts[f"{module}:attn.{part}"] for part in ("pattern", "v", "z"))
        real = torch.ones(len(z), z.shape[2], dtype=torch.bool)  # queries that are no padding
        if inputs.get("attention_mask", torch.ones(0)).shape == real.shape:
            real = inputs["attention_mask"].bool()
        made_of = pattern @ v.repeat_interleave(z.shape[1] // v.shape[1], 1)
        for got, expected in ((pattern, weights[module].float()), (made_of, z)):
            got, expected = (value.transpose(1, 2)[real] for value in (got, expected))
            torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.parametrize("name", [name for name in MORE if name != "Mamba2"])  # whose states are the outputs
def test_blocks_begin_with_the_hidden_states(name: str):
    model = made(name)
    names = blocks(name, model)
    with capture(model, [f"{block}:in" for block in names]) as acts:
        output = model(**TABLE[name]().inputs(True), output_hidden_states=True)
    states = [state for key, of_key in output.items() if "hidden_states" in key for state in of_key]
    assert all(any(value.equal(state) for state in states) for value in acts.values())


@pytest.mark.parametrize("name", ["Gemma", "Mistral", "Phi3", "Olmo2", "OPT", "GPTNeoX", "ViT", "Whisper"])
def test_scores_are_the_raw_ones_where_a_key_is_seen(name: str):
    model = made(name)
    with capture(model, ["**:attn.raw", "**:attn.scores"]) as acts:
        model(**TABLE[name]().inputs(True))
    for site in (site for site in acts if "raw" in site):
        scores = acts[site.replace("raw", "scores")]
        seen = scores > -1e4
        assert seen.any()
        torch.testing.assert_close(scores[seen], acts[site][seen], **TOLERANCE)
