import pytest
import torch
from forge_interp import InterpError, canonical_sites, record
from torch import nn

pytest.importorskip("transformers")

from .test_eager_attention import EAGER, made
from .zoo import FAMILIES, text

LLAMA = {
    "resid_pre": "{}:in",
    "attn.z": "{}.self_attn:attn.z",
    "resid_mid": "{}.post_attention_layernorm:in",
    "mlp.pre": "{}.mlp.act_fn:in",
    "mlp.post": "{}.mlp.down_proj:in",
    "resid_post": "{}:out",
}
GPT2 = LLAMA | {
    "attn.z": "{}.attn:attn.z",
    "resid_mid": "{}.ln_2:in",
    "mlp.pre": "{}.mlp.act:in",
    "mlp.post": "{}.mlp.c_proj:in",
}
GEMMA2 = LLAMA | {"resid_mid": "{}.pre_feedforward_layernorm:in"}
KNOWN = {
    "llama": ("model.layers.{}", LLAMA),
    "gpt2": ("transformer.h.{}", GPT2),
    "gemma2": ("model.layers.{}", GEMMA2),
    "qwen3": ("model.layers.{}", LLAMA),
}


@pytest.mark.parametrize("name", KNOWN)
def test_canonical_names_of_known_families(name):
    block, places = KNOWN[name]
    model = FAMILIES[name]().build("eager" if name == "gemma2" else "sdpa")
    sites = canonical_sites(model, text(False))
    expected = {
        f"blocks.{i}.{key}": site.format(block.format(i)) for i in (0, 1) for key, site in places.items()
    }
    assert dict(sites) == expected and sites.missing == {}
    recording = record(model, text(False), list(sites.values())).renamed(sites)
    assert set(recording) == set(expected)
    assert recording["blocks.0.resid_post"].equal(recording["blocks.1.resid_pre"])
    assert recording["blocks.0.mlp.post"].shape == (2, 9, 128 if name == "gpt2" else 48)


def test_what_a_family_does_not_have_is_reported():
    model, _, _ = made("GPTJ")
    sites = canonical_sites(model, text(False))
    assert "parallel" in sites.missing["blocks.0.resid_mid"] and "blocks.1.attn.z" in sites
    assert "- no module is given" in str(sites)
    with pytest.raises(KeyError, match="parallel"):
        _ = sites["blocks.0.resid_mid"]


def test_stacks_of_an_encoder_and_a_decoder_have_their_names():
    family = FAMILIES["t5"]()
    sites = canonical_sites(family.build("sdpa"), family.inputs(False))
    assert sites["encoder.block.0.attn.z"] == "encoder.block.0.layer.0.SelfAttention:attn.z"
    assert sites["decoder.block.1.resid_pre"] == "decoder.block.1:in"


@pytest.mark.parametrize("name", [name for name in EAGER if name != "DebertaV2"])
def test_every_family_has_its_stream_and_its_heads(name):
    model, _, _ = made(name)
    sites = canonical_sites(model, text(False))
    keys = ("resid_pre", "attn.z", "resid_post", *(["mlp.post"] if name != "GptOss" else []))  # has experts
    assert {f"blocks.{i}.{key}" for i in (0, 1) for key in keys} <= set(sites)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(InterpError, match="no list of blocks"):
        canonical_sites(nn.Linear(2, 2), torch.zeros(1, 2))
