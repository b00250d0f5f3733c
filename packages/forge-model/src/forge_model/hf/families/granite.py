"""Granite (arXiv:2408.13359), a Llama with multipliers, and Granite-MoE, the same with experts."""

from __future__ import annotations

from typing import Any

from forge_model.decoder.block_config import BlockConfig, ResidualBlockConfig, StandardBlockConfig
from forge_model.decoder.config import DecoderConfig
from forge_model.error import ModelError
from forge_model.hf.families.dense import Full, attention, attention_values, decoder, outer_values, values
from forge_model.hf.families.family import LAYER_KEYS, SHARED_KEYS, Family, Key, Packed
from forge_model.hf.families.moe import parts_of
from forge_model.hf.rope import rope_problems
from forge_model.moe.config import MoEConfig
from forge_model.moe.router_config import SoftmaxRouterConfig

_SHARED = SHARED_KEYS | {
    "vocab_size": Key(int, 32000),
    "intermediate_size": Key(int, 11008),
    "num_key_value_heads": Key(int, None, nullable=True),
    "max_position_embeddings": Key(int, 2048),
    "embedding_multiplier": Key(float, 1.0),
    "logits_scaling": Key(float, 1.0),
    "residual_multiplier": Key(float, 1.0),
    "attention_multiplier": Key(float, 1.0),
}


def _decoder(full: Full, **options: Any) -> DecoderConfig:
    scale = full["residual_multiplier"]
    block: BlockConfig = StandardBlockConfig() if scale == 1 else ResidualBlockConfig(scale=scale)
    return decoder(
        full,
        attention(full, scale=full["attention_multiplier"]),
        block=block,
        embedding_scale=full["embedding_multiplier"],
        logit_divisor=full["logits_scaling"],
        **options,
    )


def _read_moe(full: Full) -> DecoderConfig:
    ffn = MoEConfig(
        dim=full["intermediate_size"],
        num_experts=full["num_local_experts"],
        top_k=full["num_experts_per_tok"],
        router=SoftmaxRouterConfig(),
    )
    return _decoder(full, ffn=ffn)


def _multipliers(config: DecoderConfig) -> dict[str, float]:
    layer = config.layer(0)
    scale = getattr(layer.attention, "scale", None)
    width = attention_values(config)["head_dim"]
    if not isinstance(layer.block, StandardBlockConfig | ResidualBlockConfig):
        raise ModelError("a block other than standard or residual")
    return {
        "embedding_multiplier": config.embedding_scale,
        "logits_scaling": config.divisor,
        "residual_multiplier": getattr(layer.block, "scale", 1.0),
        "attention_multiplier": width**-0.5 if scale is None else scale,
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    return values(config) | _multipliers(config)


def _write_moe(config: DecoderConfig) -> dict[str, Any]:
    experts = parts_of(config)[0]
    return (
        outer_values(config)
        | attention_values(config)
        | _multipliers(config)
        | {
            "intermediate_size": experts.hidden(config.dim),
            "num_local_experts": experts.num_experts,
            "num_experts_per_tok": experts.top_k,
        }
    )


_8B: dict[str, Any] = {
    "vocab_size": 49152,
    "max_tokens": 131072,
    "dim": 4096,
    "num_layers": 40,
    "tie_embeddings": True,
    "attention": {"num_heads": 32, "num_kv_heads": 8, "scale": 0.0078125},
    "ffn": {"dim": 12800},
    "rope": {"theta": 1e7},
    "block": {"type": "residual", "scale": 0.22},
    "embedding_scale": 12.0,
    "logit_divisor": 16.0,
}
_3B: dict[str, Any] = {
    "vocab_size": 49155,
    "max_tokens": 4096,
    "dim": 1536,
    "num_layers": 32,
    "tie_embeddings": True,
    "attention": {"num_heads": 24, "num_kv_heads": 8, "scale": 0.015625},
    "ffn": {"type": "moe", "dim": 512, "num_experts": 40, "top_k": 8},
    "norm": {"eps": 1e-6},
    "block": {"type": "residual", "scale": 0.22},
    "embedding_scale": 12.0,
    "logit_divisor": 6.0,
}
_OLD_KEYS = {"head_dim": Key(int, None, nullable=True)}
GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    {"granite-8b": _8B},
    _SHARED | {"mlp_bias": Key(bool, False)},
    LAYER_KEYS,
    _decoder,
    _write,
    rope_problems,
    _OLD_KEYS,
)
GRANITE_MOE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    {"granitemoe-3.3b": _3B},
    _SHARED | {"num_local_experts": Key(int, 8), "num_experts_per_tok": Key(int, 2)},
    LAYER_KEYS | {"ffn.router": "block_sparse_moe.router.layer", "ffn.experts": "block_sparse_moe"},
    _read_moe,
    _write_moe,
    rope_problems,
    _OLD_KEYS,
    expert_keys={
        "w_gate": Packed("input_linear.weight", 0, 2),
        "w_up": Packed("input_linear.weight", 1, 2),
        "w_down": Packed("output_linear.weight"),
    },
)
