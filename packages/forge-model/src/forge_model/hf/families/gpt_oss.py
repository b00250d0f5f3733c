"""GPT-OSS (arXiv:2508.10925): sinks, biases everywhere, a window in every second layer, clamped experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forge_model.decoder.config import DecoderConfig
from forge_model.hf.families.dense import (
    FULL,
    SLIDING,
    Full,
    attention,
    attention_values,
    decoder,
    outer_values,
    sliding,
    type_problems,
)
from forge_model.hf.families.family import LAYER_KEYS, SHARED_KEYS, Family, Key, Packed
from forge_model.hf.families.moe import parts_of
from forge_model.hf.rope import ORIGINAL, rope_from_hf, rope_problems
from forge_model.moe.config import ClampConfig, MoEConfig
from forge_model.moe.router_config import SoftmaxRouterConfig

_KEYS = SHARED_KEYS | {
    "vocab_size": Key(int, 201088),
    "hidden_size": Key(int, 2880),
    "intermediate_size": Key(int, 2880),
    "num_hidden_layers": Key(int, 36),
    "num_attention_heads": Key(int, 64),
    "num_key_value_heads": Key(int, 8),
    "head_dim": Key(int, 64),
    "max_position_embeddings": Key(int, 131072),
    "rms_norm_eps": Key(float, 1e-5),
    "attention_bias": Key(bool, True),
    "sliding_window": Key(int, 128, nullable=True),
    "layer_types": Key(list, None, nullable=True),
    "num_experts_per_tok": Key(int, 4),
    "num_local_experts": Key(int, 128),
    "swiglu_alpha": Key(float, 1.702),
    "swiglu_limit": Key(float, 7.0),
}
_OLD_KEYS = {"initial_context_length": Key(int, None, nullable=True)}
_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, ORIGINAL: 4096}
"""The default rotary embedding of `GptOssConfig`."""


def _with_rope(full: Full) -> dict[str, Any]:
    parameters = full.get("rope_parameters")
    return {**full, "rope_parameters": _ROPE if parameters is None else parameters}


def _types(full: Full) -> list[str]:
    """Return the kind of each layer: every second sees all tokens, unless `layer_types` is set."""
    if full["layer_types"] is not None:
        return full["layer_types"]
    return [FULL if index % 2 else SLIDING for index in range(full["num_hidden_layers"])]


def _read(full: Full) -> DecoderConfig:
    sees_all = attention(full, sinks=True)
    ffn = MoEConfig(
        dim=full["intermediate_size"],
        bias=True,
        num_experts=full["num_local_experts"],
        top_k=full["num_experts_per_tok"],
        router=SoftmaxRouterConfig(bias=True),
        clamp=ClampConfig(limit=full["swiglu_limit"], alpha=full["swiglu_alpha"]),
    )
    windows = sliding(_types(full), sees_all, full["sliding_window"])
    rope, given = rope_from_hf(_with_rope(full)), full["initial_context_length"]
    original = getattr(rope, "original_max_tokens", given)
    if given not in (None, original):
        raise ValueError(f"initial_context_length = {given}, where the rope has {ORIGINAL} = {original}")
    return decoder(full, sees_all, ffn=ffn, rope=rope, overrides=windows)


def _problems(full: Full) -> Iterator[str]:
    yield from type_problems(full, _types(full), full["sliding_window"], "sliding_window")
    yield from rope_problems(_with_rope(full))


def _write(config: DecoderConfig) -> dict[str, Any]:
    experts = parts_of(config)[0]
    clamp, found = experts.clamp or ClampConfig(), outer_values(config) | attention_values(config)
    if found["sliding_window"] is None:  # transformers makes a mask of it even if no layer has one
        del found["sliding_window"]
    return found | {
        "intermediate_size": experts.hidden(config.dim),
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "swiglu_alpha": clamp.alpha,
        "swiglu_limit": clamp.limit,
    }


def _preset(num_layers: int, num_experts: int) -> dict[str, Any]:
    attention = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "sinks": True}
    attention |= {"bias": True, "output_bias": True}
    experts = {"num_experts": num_experts, "top_k": 4, "dim": 2880, "bias": True, "clamp": {}}
    return {
        "vocab_size": 201088,
        "max_tokens": 131072,
        "dim": 2880,
        "num_layers": num_layers,
        "attention": attention,
        "ffn": {"type": "moe"} | experts | {"router": {"bias": True}},
        "rope": {"type": "yarn", "theta": 150000.0, "factor": 32.0, "truncate": False},
        "overrides": [{"layers": "::2", "attention": attention | {"sliding_window": 128}}],
    }


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    {"gpt_oss-20b": _preset(24, 32), "gpt_oss-120b": _preset(36, 128)},
    _KEYS,
    LAYER_KEYS
    | {
        "attention.sinks.weight": "self_attn.sinks",
        "ffn.router": "mlp.router",
        "ffn.experts": "mlp.experts",
    },
    _read,
    _write,
    _problems,
    _OLD_KEYS,
    theta=150000.0,
    expert_keys={
        "w_gate": Packed("gate_up_proj", 0, 2, "row", transposed=True),
        "w_up": Packed("gate_up_proj", 1, 2, "row", transposed=True),
        "w_down": Packed("down_proj", transposed=True),
        "b_gate": Packed("gate_up_proj_bias", 0, 2, "row"),
        "b_up": Packed("gate_up_proj_bias", 1, 2, "row"),
        "b_down": Packed("down_proj_bias"),
    },
    aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
)
