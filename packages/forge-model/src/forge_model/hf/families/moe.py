"""Mixtral, Qwen3-MoE, OLMoE (arXiv:2401.04088, arXiv:2505.09388, arXiv:2409.02060), and keys of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from forge_model.decoder.config import DecoderConfig, LayerOverride
from forge_model.error import ModelError
from forge_model.ffn.config import SwiGLUConfig
from forge_model.hf.families.dense import (
    Full,
    attention,
    attention_values,
    decoder,
    outer_values,
    runs,
)
from forge_model.hf.families.family import LAYER_KEYS, SHARED_KEYS, Family, Key
from forge_model.hf.rope import rope_problems
from forge_model.moe.config import MoEConfig
from forge_model.moe.router_config import SoftmaxRouterConfig

MOE_LAYER_KEYS = LAYER_KEYS | {"ffn.router": "mlp.gate", "ffn.experts": "mlp.experts"}
EXPERT_KEYS = {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}
"""Our stacked parameters, and their names within each expert."""

NORMED_KEYS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}

_UNBIASED = {name: key for name, key in SHARED_KEYS.items() if name != "attention_bias"}
_MIXTRAL_KEYS = _UNBIASED | {
    "vocab_size": Key(int, 32000),
    "intermediate_size": Key(int, 14336),
    "num_key_value_heads": Key(int, 8, nullable=True),
    "head_dim": Key(int, None, nullable=True),
    "max_position_embeddings": Key(int, 131072),
    "rms_norm_eps": Key(float, 1e-5),
    "sliding_window": Key(int, None, nullable=True),
    "num_experts_per_tok": Key(int, 2),
    "num_local_experts": Key(int, 8),
}
_QWEN3_KEYS = SHARED_KEYS | {
    "vocab_size": Key(int, 151936),
    "hidden_size": Key(int, 2048),
    "intermediate_size": Key(int, 6144),
    "num_hidden_layers": Key(int, 24),
    "num_key_value_heads": Key(int, 4),
    "max_position_embeddings": Key(int, 32768),
    "use_sliding_window": Key(bool, False),
    "sliding_window": Key(int, 4096, nullable=True),
    "decoder_sparse_step": Key(int, 1),
    "moe_intermediate_size": Key(int, 768),
    "num_experts_per_tok": Key(int, 8),
    "num_experts": Key(int, 128),
    "norm_topk_prob": Key(bool, False),
    "mlp_only_layers": Key(list, None, nullable=True),
}
_OLMOE_KEYS = SHARED_KEYS | {
    "vocab_size": Key(int, 50304),
    "hidden_size": Key(int, 2048),
    "intermediate_size": Key(int, 2048),
    "num_hidden_layers": Key(int, 16),
    "num_attention_heads": Key(int, 16),
    "num_key_value_heads": Key(int, None, nullable=True),
    "max_position_embeddings": Key(int, 4096),
    "rms_norm_eps": Key(float, 1e-5),
    "num_experts_per_tok": Key(int, 8),
    "num_experts": Key(int, 64),
    "norm_topk_prob": Key(bool, False),
}


def dense_layers(layers: Sequence[int], hidden: int) -> list[LayerOverride]:
    """Return the overrides for layers with a plain gated feed-forward; empty if there are none."""
    return [LayerOverride(layers=runs(layers), ffn=SwiGLUConfig(dim=hidden))] if layers else []


def parts_of(config: DecoderConfig) -> tuple[MoEConfig, list[int], SwiGLUConfig | None]:
    """Return the first experts, the layers without experts, and the first feed-forward of these layers.

    Raises:
        ModelError: no layer has experts, or layers have feed-forwards of other kinds.
    """
    ffns = [config.layer(index).ffn for index in range(config.num_layers)]
    experts = next((one for one in ffns if isinstance(one, MoEConfig)), None)
    dense = next((one for one in ffns if isinstance(one, SwiGLUConfig)), None)
    if experts is None:
        raise ModelError("no layer has experts")
    if any(not isinstance(one, MoEConfig | SwiGLUConfig) for one in ffns):
        raise ModelError("a feed-forward other than moe or swiglu")
    return experts, [i for i, one in enumerate(ffns) if not isinstance(one, MoEConfig)], dense


def _experts(full: Full, hidden: int, number: int, normalize: bool) -> MoEConfig:
    router = SoftmaxRouterConfig(normalize=normalize)
    return MoEConfig(dim=hidden, num_experts=number, top_k=full["num_experts_per_tok"], router=router)


def _read_mixtral(full: Full) -> DecoderConfig:
    ffn = _experts(full, full["intermediate_size"], full["num_local_experts"], True)
    return decoder(full, attention(full, sliding_window=full["sliding_window"]), ffn=ffn)


def _read_qwen3(full: Full) -> DecoderConfig:
    ffn = _experts(full, full["moe_intermediate_size"], full["num_experts"], full["norm_topk_prob"])
    window = full["sliding_window"] if full["use_sliding_window"] else None
    overrides = dense_layers(without_experts(full), full["intermediate_size"])
    return decoder(full, attention(full, qk_norm=True, sliding_window=window), ffn=ffn, overrides=overrides)


def _read_olmoe(full: Full) -> DecoderConfig:
    ffn = _experts(full, full["intermediate_size"], full["num_experts"], full["norm_topk_prob"])
    return decoder(full, attention(full, qk_norm=True, qk_norm_over="projection"), ffn=ffn)


def _qwen3_problems(full: Full) -> Iterator[str]:
    yield from rope_problems(full)
    yield from sparse_problems(full)


def without_experts(full: Full) -> list[int]:
    """Return the layers without experts according to the keys of Qwen."""
    step, only = full["decoder_sparse_step"], full["mlp_only_layers"] or []
    return [i for i in range(full["num_hidden_layers"]) if i in only or (i + 1) % step]


def sparse_problems(full: Full) -> Iterator[str]:
    """Yield the problems with keys that name layers without experts."""
    only = full["mlp_only_layers"] or []
    wrong = [one for one in only if not isinstance(one, int) or not 0 <= one < full["num_hidden_layers"]]
    if wrong:
        yield f"mlp_only_layers names {wrong}, which are no layers"


def moe_values(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys for experts in any layers, under all names that families use for them."""
    experts, dense, plain = parts_of(config)
    hidden = experts.hidden(config.dim)
    return (
        outer_values(config)
        | attention_values(config)
        | {
            "intermediate_size": hidden if plain is None else plain.hidden(config.dim),
            "moe_intermediate_size": hidden,
            "num_experts": experts.num_experts,
            "num_local_experts": experts.num_experts,
            "num_experts_per_tok": experts.top_k,
            "norm_topk_prob": getattr(experts.router, "normalize", True),
            "mlp_only_layers": dense,
            "decoder_sparse_step": 1,
        }
    )


def _preset(dim: int, num_layers: int, attention: dict[str, Any], ffn: dict[str, Any], **model: Any) -> Any:
    sizes = {"dim": dim, "num_layers": num_layers, "attention": attention}
    return sizes | {"ffn": {"type": "moe"} | ffn} | model


_MIXTRAL = _preset(
    4096,
    32,
    {"num_heads": 32, "num_kv_heads": 8},
    {"dim": 14336, "num_experts": 8, "top_k": 2},
    vocab_size=32000,
    max_tokens=32768,
    rope={"theta": 1e6},
)
_QWEN3 = {"vocab_size": 151936, "max_tokens": 40960, "rope": {"theta": 1e6}, "norm": {"eps": 1e-6}}
_QWEN3_PRESETS = {
    "qwen3_moe-30b": _preset(
        2048,
        48,
        {"num_heads": 32, "num_kv_heads": 4, "head_dim": 128, "qk_norm": True},
        {"dim": 768, "num_experts": 128, "top_k": 8},
        **_QWEN3,
    ),
    "qwen3_moe-235b": _preset(
        4096,
        94,
        {"num_heads": 64, "num_kv_heads": 4, "head_dim": 128, "qk_norm": True},
        {"dim": 1536, "num_experts": 128, "top_k": 8},
        **_QWEN3,
    ),
}
_OLMOE = _preset(
    2048,
    16,
    {"num_heads": 16, "qk_norm": True, "qk_norm_over": "projection"},
    {"dim": 1024, "num_experts": 64, "top_k": 8, "router": {"normalize": False}},
    vocab_size=50304,
    max_tokens=4096,
)

MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    {"mixtral-47b": _MIXTRAL},
    _MIXTRAL_KEYS,
    LAYER_KEYS | {"ffn.router": "block_sparse_moe.gate", "ffn.experts": "block_sparse_moe.experts"},
    _read_mixtral,
    moe_values,
    rope_problems,
    fixed={"hidden_act": "silu", "router_jitter_noise": 0.0},
    theta=1e6,
    expert_keys={"w_gate": "w1", "w_up": "w3", "w_down": "w2"},
    aliases={"num_experts": "num_local_experts"},
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _QWEN3_PRESETS,
    _QWEN3_KEYS,
    MOE_LAYER_KEYS | NORMED_KEYS,
    _read_qwen3,
    moe_values,
    _qwen3_problems,
    {"head_dim": Key(int, None, nullable=True), "max_window_layers": Key(int, 28, zero=True)},
    expert_keys=EXPERT_KEYS,
    aliases={"num_local_experts": "num_experts"},
)
OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    {"olmoe-7b": _OLMOE},
    _OLMOE_KEYS,
    MOE_LAYER_KEYS | NORMED_KEYS,
    _read_olmoe,
    moe_values,
    rope_problems,
    fixed={"hidden_act": "silu", "clip_qkv": None},
    expert_keys=EXPERT_KEYS,
    aliases={"num_local_experts": "num_experts"},
)
