from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from forge_interp.errors import InterpError
from forge_interp.model_inputs import call_model, output_logits

X, LOGITS = torch.ones(2, 3), torch.zeros(2, 3, 5)


def called(*args, **kwargs):
    return args, kwargs


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [
        (X, (X,), {}),
        ((X, 1), (X, 1), {}),
        ([X, 1], (X, 1), {}),
        ({"x": X, "mask": None}, (), {"x": X, "mask": None}),
        (UserDict(x=X), (), {"x": X}),  # what tokenizers of Hugging Face return
    ],
    ids=["tensor", "tuple", "list", "mapping", "batch encoding"],
)
def test_call_model_spreads_inputs(inputs, args, kwargs):
    assert call_model(called, inputs) == (args, kwargs)


@pytest.mark.parametrize(
    "output",
    [LOGITS, (LOGITS, "cache"), [LOGITS], {"logits": LOGITS, "loss": None}, SimpleNamespace(logits=LOGITS)],
    ids=["tensor", "tuple", "list", "mapping", "attribute"],
)
def test_output_logits_finds_them(output):
    assert output_logits(output) is LOGITS


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (torch.tensor(0.5), r"a tensor of shape \(\)"),
        (LOGITS.long(), r".*dtype torch\.int64"),
        ({"loss": LOGITS}, r"a dict with \['loss'\]"),
        (SimpleNamespace(logits=None), "a SimpleNamespace"),
        ((), "a tuple"),
        (None, "a NoneType"),
    ],
    ids=["scalar", "integers", "mapping", "none inside", "empty", "none"],
)
def test_output_logits_says_what_there_is_instead(output, said):
    with pytest.raises(InterpError, match=f"the model returned {said}.*expected logits"):
        output_logits(output)


def test_call_model_lets_no_cache_be_filled_unless_asked_to():
    class Caching(torch.nn.Module):
        config = SimpleNamespace(use_cache=True)

        def forward(self, x, use_cache=None):
            return use_cache

    model = Caching()
    assert [call_model(model, inputs) for inputs in (X, (X,), {"x": X})] == [False] * 3
    assert call_model(model, {"x": X, "use_cache": True}) is True
