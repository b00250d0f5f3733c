"""dots.llm1 (arXiv:2506.05767): the attention of Qwen 3 with the experts of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forge_model.decoder.config import DecoderConfig
from forge_model.hf.families.deepseek import (
    SHARED_EXPERTS,
    expert_values,
    no_shared_experts,
    sigmoid,
    with_experts,
)
from forge_model.hf.families.dense import (
    FULL,
    SLIDING,
    Full,
    attention,
    attention_values,
    outer_values,
    sliding,
    type_problems,
)
from forge_model.hf.families.family import SHARED_KEYS, Family, Key
from forge_model.hf.families.moe import EXPERT_KEYS, MOE_LAYER_KEYS, NORMED_KEYS
from forge_model.hf.rope import rope_problems
from forge_model.moe.router_config import SigmoidRouterConfig

_KEYS = SHARED_KEYS | {
    "vocab_size": Key(int, 152064),
    "hidden_size": Key(int, 4608),
    "intermediate_size": Key(int, 10944),
    "num_hidden_layers": Key(int, 62),
    "num_key_value_heads": Key(int, 32, nullable=True),
    "max_position_embeddings": Key(int, 2048),
    "moe_intermediate_size": Key(int, 1408),
    "num_experts_per_tok": Key(int, None, nullable=True),
    "n_shared_experts": Key(int, None, nullable=True, zero=True),
    "n_routed_experts": Key(int, None, nullable=True),
    "routed_scaling_factor": Key(float, 1.0),
    "n_group": Key(int, 1, nullable=True),
    "topk_group": Key(int, 1, nullable=True),
    "first_k_dense_replace": Key(int, 0, nullable=True, zero=True),
    "norm_topk_prob": Key(bool, False, nullable=True),
    "sliding_window": Key(int, 4096, nullable=True),
    "max_window_layers": Key(int, 62, nullable=True, zero=True),
    "layer_types": Key(list, None, nullable=True),
}
NEEDED = ("num_experts_per_tok", "n_shared_experts", "n_routed_experts", "n_group", "topk_group")


def _types(full: Full) -> list[str]:
    """Return the kind of each layer: the last ones have a window, unless `layer_types` is set."""
    if full["layer_types"] is not None:
        return full["layer_types"]
    first = full["num_hidden_layers"] if full["sliding_window"] is None else full["max_window_layers"]
    return [SLIDING if index >= first else FULL for index in range(full["num_hidden_layers"])]


def _read(full: Full) -> DecoderConfig:
    base = attention(full, qk_norm=True)
    windows = sliding(_types(full), base, full["sliding_window"])
    return with_experts(full, base, sigmoid(full), overrides=windows)


def _problems(full: Full) -> Iterator[str]:
    dense = full["first_k_dense_replace"]
    needed = () if dense is not None and dense >= full["num_hidden_layers"] else NEEDED
    needed = ("first_k_dense_replace", "norm_topk_prob", "max_window_layers", *needed)
    if missing := [name for name in needed if full[name] is None]:
        yield f"{', '.join(missing)} = None, expected a value"
        return
    yield from type_problems(full, _types(full), full["sliding_window"], "sliding_window")
    yield from rope_problems(full)


def _write(config: DecoderConfig) -> dict[str, Any]:
    return outer_values(config) | attention_values(config) | expert_values(config, SigmoidRouterConfig)


_142B: dict[str, Any] = {
    "vocab_size": 152064,
    "max_tokens": 32768,
    "dim": 4096,
    "num_layers": 62,
    "attention": {"num_heads": 32, "qk_norm": True},
    "rope": {"theta": 1e7},
    "ffn": {
        "type": "moe",
        "dim": 1408,
        "num_experts": 128,
        "top_k": 6,
        "shared_experts": 2,
        "router": {"type": "sigmoid", "scale": 2.5},
    },
    "overrides": [{"layers": "0", "ffn": {"type": "swiglu", "dim": 10944}}],
}

DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM",
    {"dots1-142b": _142B},
    _KEYS,
    MOE_LAYER_KEYS | NORMED_KEYS | SHARED_EXPERTS,
    _read,
    _write,
    _problems,
    {"head_dim": Key(int, None, nullable=True)},
    expert_keys=EXPERT_KEYS,
    empty=no_shared_experts,
    aliases={"num_local_experts": "n_routed_experts"},
)
