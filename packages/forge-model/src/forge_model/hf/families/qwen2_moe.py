"""Qwen2-MoE (arXiv:2407.10671 section 2.2.2): small experts, and a gated shared expert for every token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forge_model.decoder.config import DecoderConfig
from forge_model.hf.families.dense import FULL, SLIDING, Full, attention, decoder, sliding, type_problems
from forge_model.hf.families.family import SHARED_KEYS, Family, Key
from forge_model.hf.families.moe import (
    EXPERT_KEYS,
    MOE_LAYER_KEYS,
    dense_layers,
    moe_values,
    parts_of,
    sparse_problems,
    without_experts,
)
from forge_model.hf.rope import rope_problems
from forge_model.moe.config import MoEConfig
from forge_model.moe.router_config import SoftmaxRouterConfig

_KEYS = {name: key for name, key in SHARED_KEYS.items() if name != "attention_bias"} | {
    "vocab_size": Key(int, 151936),
    "hidden_size": Key(int, 2048),
    "intermediate_size": Key(int, 5632),
    "num_hidden_layers": Key(int, 24),
    "num_attention_heads": Key(int, 16),
    "num_key_value_heads": Key(int, 16, nullable=True),
    "max_position_embeddings": Key(int, 32768),
    "use_sliding_window": Key(bool, False),
    "sliding_window": Key(int, 4096, nullable=True, zero=True),
    "max_window_layers": Key(int, 28, zero=True),
    "decoder_sparse_step": Key(int, 1),
    "moe_intermediate_size": Key(int, 1408),
    "shared_expert_intermediate_size": Key(int, 5632),
    "num_experts_per_tok": Key(int, 4),
    "num_experts": Key(int, 60),
    "norm_topk_prob": Key(bool, False),
    "mlp_only_layers": Key(list, None, nullable=True),
    "qkv_bias": Key(bool, True),
    "layer_types": Key(list, None, nullable=True),
}


def _types(full: Full) -> list[str]:
    """Return the kind of each layer: every second of the first has a window, unless `layer_types` is set."""
    if full["layer_types"] is not None:
        return full["layer_types"]
    first = full["max_window_layers"] if full["use_sliding_window"] else 0
    layers = range(full["num_hidden_layers"])
    return [SLIDING if not index % 2 and index < first else FULL for index in layers]


def _window(full: Full) -> int | None:
    return (full["sliding_window"] or None) if full["use_sliding_window"] else None


def _read(full: Full) -> DecoderConfig:
    base, window = attention(full, bias=full["qkv_bias"], output_bias=False), _window(full)
    ffn = MoEConfig(
        dim=full["moe_intermediate_size"],
        num_experts=full["num_experts"],
        top_k=full["num_experts_per_tok"],
        router=SoftmaxRouterConfig(normalize=full["norm_topk_prob"]),
        shared_experts=1,
        shared_dim=full["shared_expert_intermediate_size"],
        shared_gate=True,
    )
    overrides = dense_layers(without_experts(full), full["intermediate_size"])
    overrides += [] if window is None else sliding(_types(full), base, window)
    return decoder(full, base, ffn=ffn, overrides=overrides)


def _problems(full: Full) -> Iterator[str]:
    yield from type_problems(full, _types(full), _window(full), "use_sliding_window and sliding_window")
    yield from sparse_problems(full)
    yield from rope_problems(full)


def _write(config: DecoderConfig) -> dict[str, Any]:
    experts, found = parts_of(config)[0], moe_values(config)
    return found | {
        "qkv_bias": found["attention_bias"],
        "shared_expert_intermediate_size": experts.shared_hidden(config.dim) or 1,
    }


_14B: dict[str, Any] = {
    "vocab_size": 151936,
    "max_tokens": 8192,
    "dim": 2048,
    "num_layers": 24,
    "attention": {"num_heads": 16, "bias": True},
    "norm": {"eps": 1e-6},
    "rope": {"theta": 1e6},
    "ffn": {
        "type": "moe",
        "dim": 1408,
        "num_experts": 60,
        "top_k": 4,
        "shared_experts": 1,
        "shared_dim": 5632,
        "shared_gate": True,
        "router": {"normalize": False},
    },
}

QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    {"qwen2_moe-14b": _14B},
    _KEYS,
    MOE_LAYER_KEYS
    | {f"ffn.shared.{ours}": f"mlp.shared_expert.{theirs}" for ours, theirs in EXPERT_KEYS.items()}
    | {"ffn.shared_gate": "mlp.shared_expert_gate"},
    _read,
    _write,
    _problems,
    {"head_dim": Key(int, None, nullable=True)},
    expert_keys=EXPERT_KEYS,
    aliases={"num_local_experts": "num_experts"},
)
