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


class Attention(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.act = nn.ReLU()

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.down(self.act(self.up(self.norm(x))))


class Numbered(nn.Module):
    """Blocks in a mapping with numbers as keys, as a stage of a pipeline holds them, inside of another."""

    def __init__(self):
        super().__init__()
        blocks = nn.ModuleDict({"0": Block(), "1": Block()})
        self.parts = nn.ModuleDict({"embed": nn.Embedding(10, 8), "h": blocks})

    def forward(self, ids):
        x = self.parts["embed"](ids)
        for block in self.parts["h"].values():
            x = block(x)
        return x


def test_blocks_in_a_mapping_with_numbers_are_found():
    sites = canonical_sites(Numbered(), torch.randint(10, (2, 5)))
    assert (
        sites["blocks.1.resid_pre"] == "parts.h.1:in"
        and sites["blocks.1.attn.z"] == "parts.h.1.attention:attn.z"
    )
    assert sites["blocks.0.mlp.post"] == "parts.h.0.down:in"


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


SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GRANITE = {
    "shared_intermediate_size": 24,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "residual_multiplier": 1.0,
}
NEXT = {
    "shared_expert_intermediate_size": 24,
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
# Family, what its configuration says, which blocks have attention, and which an MLP that is one map.
MIXED = {
    "Qwen3Moe": ({**EXPERTS, "mlp_only_layers": [0], "head_dim": 8}, {0, 1, 2}, {0}),
    "DeepseekV3": (DEEPSEEK, {0, 1, 2}, {0}),
    "GraniteMoeHybrid": (
        {**GRANITE, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0},
        {1},
        {0, 1, 2},
    ),
    "GraniteMoeHybrid with experts": (
        {**GRANITE, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4},
        {1},
        set(),
    ),
    "Lfm2": ({"layer_types": ["conv", "full_attention", "conv"]}, {1}, {0, 1, 2}),
    "Qwen3Next": (
        {
            **EXPERTS,
            **NEXT,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_only_layers": [2],
        },
        {1},
        {2},
    ),
}


@pytest.mark.parametrize("name", MIXED)
@torch.no_grad()
def test_blocks_of_one_class_are_mapped_by_what_they_have(name):
    import transformers

    changes, with_attention, with_mlp = MIXED[name]
    family = name.split()[0]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    ids = torch.randint(2, 30, (2, 16))
    sites = canonical_sites(model, {"input_ids": ids})
    for i in range(3):
        assert (f"blocks.{i}.attn.z" in sites) == (i in with_attention)
        assert (f"blocks.{i}.mlp.post" in sites) == (i in with_mlp)
        assert {f"blocks.{i}.{end}" for end in ("resid_pre", "resid_mid", "resid_post")} <= set(sites)
    assert len(sites) + len(sites.missing) == 3 * 6 and not sites.keys() & sites.missing.keys()
    values = record(model, {"input_ids": ids}, list(sites.values())).renamed(sites)
    assert set(values) == set(sites)
    for i in with_mlp:
        last = model.get_submodule(sites[f"blocks.{i}.mlp.post"].removesuffix(":in"))
        written = values[f"blocks.{i}.resid_mid"] + last(values[f"blocks.{i}.mlp.post"])
        torch.testing.assert_close(written, values[f"blocks.{i}.resid_post"])
