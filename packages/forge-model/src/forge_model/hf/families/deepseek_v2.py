"""DeepSeek-V2 (arXiv:2405.04434): latent attention, experts chosen by a softmax, optionally by groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forge_model.decoder.config import DecoderConfig
from forge_model.hf.families.deepseek import (
    LATENT_LAYER_KEYS,
    expert_values,
    latent,
    latent_problems,
    latent_values,
    no_shared_experts,
    with_experts,
)
from forge_model.hf.families.dense import Full
from forge_model.hf.families.family import SHARED_KEYS, Family, Key
from forge_model.hf.families.moe import EXPERT_KEYS
from forge_model.hf.rope import rope_from_hf
from forge_model.moe.router_config import SoftmaxRouterConfig

GREEDY, LIMITED = "greedy", "group_limited_greedy"
_KEYS = SHARED_KEYS | {
    "vocab_size": Key(int, 102400),
    "intermediate_size": Key(int, 11008),
    "num_key_value_heads": Key(int, None, nullable=True),
    "max_position_embeddings": Key(int, 2048),
    "kv_lora_rank": Key(int, 512),
    "q_lora_rank": Key(int, 1536, nullable=True),
    "qk_rope_head_dim": Key(int, 64),
    "v_head_dim": Key(int, 128),
    "qk_nope_head_dim": Key(int, 128),
    "head_dim": Key(int, None, nullable=True),
    "first_k_dense_replace": Key(int, 0, zero=True),
    "moe_intermediate_size": Key(int, 1407),
    "n_shared_experts": Key(int, 2, zero=True),
    "n_routed_experts": Key(int, 64),
    "routed_scaling_factor": Key(float, 1.0),
    "topk_method": Key(str, GREEDY),
    "n_group": Key(int, None, nullable=True),
    "topk_group": Key(int, None, nullable=True),
    "num_experts_per_tok": Key(int, None, nullable=True),
}


def _read(full: Full) -> DecoderConfig:
    limited = full["topk_method"] == LIMITED
    router = SoftmaxRouterConfig(
        normalize=False,
        scale=full["routed_scaling_factor"],
        groups=full["n_group"] if limited else 1,
        top_groups=full["topk_group"] if limited else 1,
    )
    rope = rope_from_hf(full)
    return with_experts(full, latent(full, rope), router, rope=rope)


def _problems(full: Full) -> Iterator[str]:
    yield from latent_problems(full)
    if full["hidden_size"] % full["num_attention_heads"]:
        yield f"hidden_size = {full['hidden_size']} is no multiple of num_attention_heads"
    if full["topk_method"] not in (GREEDY, LIMITED):
        yield f"topk_method = {full['topk_method']!r}, only {GREEDY} and {LIMITED} can be read"
    needed = ["num_experts_per_tok"] + ["n_group", "topk_group"] * (full["topk_method"] == LIMITED)
    if full["first_k_dense_replace"] < full["num_hidden_layers"]:
        yield from (f"{name} = None, expected a number" for name in needed if full[name] is None)


def _write(config: DecoderConfig) -> dict[str, Any]:
    found = latent_values(config) | expert_values(config, SoftmaxRouterConfig)
    limited = found.get("n_group", 1) > 1
    return found | {"topk_method": LIMITED if limited else GREEDY}


_LITE: dict[str, Any] = {
    "vocab_size": 102400,
    "max_tokens": 4096,
    "dim": 2048,
    "num_layers": 27,
    "norm": {"eps": 1e-6},
    "attention": {"type": "mla", "num_heads": 16, "kv_rank": 512},
    "ffn": {
        "type": "moe",
        "dim": 1408,
        "num_experts": 64,
        "top_k": 6,
        "shared_experts": 2,
        "router": {"normalize": False},
    },
    "overrides": [{"layers": "0", "ffn": {"type": "swiglu", "dim": 10944}}],
}
"""The model before its context was extended."""

DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    {"deepseek_v2-16b": _LITE},
    _KEYS,
    LATENT_LAYER_KEYS,
    _read,
    _write,
    _problems,
    {"qk_head_dim": Key(int, None, nullable=True)},
    fixed={"hidden_act": "silu", "norm_topk_prob": False},
    expert_keys=EXPERT_KEYS,
    empty=no_shared_experts,
    aliases={"num_experts": "n_routed_experts"},
)
