"""GLM-4.5 (arXiv:2508.06471): grouped-query attention with the experts of DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from forge_model.decoder.config import DecoderConfig
from forge_model.hf.families.deepseek import (
    MTP_KEYS,
    SHARED_EXPERTS,
    expert_values,
    modules,
    no_shared_experts,
    sigmoid,
    with_experts,
)
from forge_model.hf.families.dense import Full, attention, attention_values, outer_values
from forge_model.hf.families.family import SHARED_KEYS, Family, Key
from forge_model.hf.families.glm4 import PARTIAL, partial_problems, with_part
from forge_model.hf.families.moe import EXPERT_KEYS, MOE_LAYER_KEYS, NORMED_KEYS
from forge_model.hf.rope import rotary_dim
from forge_model.moe.router_config import SigmoidRouterConfig

_KEYS = SHARED_KEYS | {
    "vocab_size": Key(int, 151552),
    "intermediate_size": Key(int, 10944),
    "num_hidden_layers": Key(int, 46),
    "num_attention_heads": Key(int, 96),
    "num_key_value_heads": Key(int, 8),
    "max_position_embeddings": Key(int, 131072),
    "rms_norm_eps": Key(float, 1e-5),
    "moe_intermediate_size": Key(int, 1408),
    "num_experts_per_tok": Key(int, 8),
    "n_shared_experts": Key(int, 1, zero=True),
    "n_routed_experts": Key(int, 128),
    "routed_scaling_factor": Key(float, 1.0),
    "n_group": Key(int, 1),
    "topk_group": Key(int, 1),
    "first_k_dense_replace": Key(int, 1, zero=True),
    "norm_topk_prob": Key(bool, True),
    "use_qk_norm": Key(bool, False),
}
_OLD_KEYS = PARTIAL | {
    "head_dim": Key(int, None, nullable=True),
    "num_nextn_predict_layers": Key(int, 1, zero=True),
}


def _read(full: Full) -> DecoderConfig:
    width = full["head_dim"] or full["hidden_size"] // full["num_attention_heads"]
    heads = attention(full, output_bias=False, qk_norm=full["use_qk_norm"], rope_dim=rotary_dim(full, width))
    return with_experts(full, heads, sigmoid(full), mtp=modules(full))


def _write(config: DecoderConfig) -> dict[str, Any]:
    found = with_part(outer_values(config) | attention_values(config))
    return (
        found
        | expert_values(config, SigmoidRouterConfig)
        | {
            "use_qk_norm": getattr(config.layer(0).attention, "qk_norm", False),
            "num_nextn_predict_layers": config.mtp.num_modules,
        }
    )


_AIR: dict[str, Any] = {
    "vocab_size": 151552,
    "max_tokens": 131072,
    "dim": 4096,
    "num_layers": 46,
    "attention": {"num_heads": 96, "num_kv_heads": 8, "head_dim": 128, "bias": True, "rope_dim": 64},
    "rope": {"theta": 1e6},
    "ffn": {
        "type": "moe",
        "dim": 1408,
        "num_experts": 128,
        "top_k": 8,
        "shared_experts": 1,
        "router": {"type": "sigmoid"},
    },
    "overrides": [{"layers": "0", "ffn": {"type": "swiglu", "dim": 10944}}],
}

GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    {"glm4_moe-106b": _AIR},
    _KEYS,
    MOE_LAYER_KEYS | NORMED_KEYS | SHARED_EXPERTS,
    _read,
    _write,
    partial_problems,
    _OLD_KEYS,
    expert_keys=EXPERT_KEYS,
    mtp_keys=MTP_KEYS,
    empty=no_shared_experts,
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
)
