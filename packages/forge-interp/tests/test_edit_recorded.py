"""What a model of transformers records of its own blocks is what it went on with, edits included."""

import copy

import pytest
import torch
from forge_interp import capture, edit
from torch import nn

transformers = pytest.importorskip("transformers")
IDS = torch.randint(9, (2, 5), generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 9,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "attn_implementation": "eager",
}
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", "model.layers.1", SIZES),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        "model.layers.1",
        SIZES | {"num_key_value_heads": 1, "num_local_experts": 4},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", "bert.encoder.layer.1", SIZES),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        "transformer.h.1",
        {"vocab_size": 9, "n_embd": 8, "n_layer": 3, "n_head": 2, "attn_implementation": "eager"},
    ),
}


def build(family: str) -> tuple[nn.Module, str]:
    config, model, block, sizes = FAMILIES[family]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval(), block


@torch.no_grad()
def outputs(model: nn.Module) -> list[torch.Tensor]:
    found = model(IDS, output_hidden_states=True, output_attentions=True)
    return [found.logits, *found.hidden_states, *found.attentions]


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_have_an_edit_of_their_block_however_often_they_were_asked_for(family: str):
    model, block = build(family)
    plain = copy.deepcopy(model)
    plain.get_submodule(block).register_forward_hook(
        lambda module, args, out: (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out
    )
    expected = outputs(plain)
    unedited = outputs(model)
    for _ in range(2):
        with edit(model, {block: lambda value: 2 * value}):
            for got, wanted in zip(outputs(model), expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        for got, wanted in zip(outputs(model), unedited, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_the_order_of_hooks_is_what_it_was_when_an_edit_has_ended():
    model, block = build("llama")
    module, seen = model.get_submodule(block), []
    outputs(model)
    module.register_forward_hook(lambda *_: seen.append("own"))
    before = list(module._forward_hooks)
    with edit(model, {block: lambda value: 2 * value}), capture(model, block):
        later = module.register_forward_hook(lambda *_: seen.append("later"))
        outputs(model)
    assert list(module._forward_hooks) == [*before, later.id] and seen == ["own", "later"]
