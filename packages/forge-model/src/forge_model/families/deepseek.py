"""DeepSeek-V3 (arXiv:2412.19437): latent attention."""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from typing import Any

from forge_model.attention_config import LatentConfig
from forge_model.decoder_config import DecoderConfig
from forge_model.error import ModelError
from forge_model.families.dense import Full, decoder, gated_values, outer_values
from forge_model.families.family import LAYER_KEYS, SHARED_KEYS, Family, Key
from forge_model.hf_rope import rope_from_hf, rope_problems
from forge_model.rope_config import RopeConfig, YarnRopeConfig

_KEYS = SHARED_KEYS | {
    "vocab_size": Key(int, 129280),
    "hidden_size": Key(int, 7168),
    "intermediate_size": Key(int, 18432),
    "num_hidden_layers": Key(int, 61),
    "num_attention_heads": Key(int, 128),
    "num_key_value_heads": Key(int, 128, nullable=True),
    "max_position_embeddings": Key(int, 4096),
    "kv_lora_rank": Key(int, 512),
    "q_lora_rank": Key(int, 1536, nullable=True),
    "qk_rope_head_dim": Key(int, 64),
    "v_head_dim": Key(int, 128),
    "qk_nope_head_dim": Key(int, 128),
    "rope_interleave": Key(bool, True),
    "first_k_dense_replace": Key(int, 3),
    "moe_intermediate_size": Key(int, 2048),
    "n_shared_experts": Key(int, 1),
    "n_routed_experts": Key(int, 256),
    "routed_scaling_factor": Key(float, 2.5),
    "n_group": Key(int, 8),
    "topk_group": Key(int, 4),
    "num_experts_per_tok": Key(int, 8),
    "norm_topk_prob": Key(bool, True),
}
_OLD_KEYS = {
    "head_dim": Key(int, None, nullable=True),
    "qk_head_dim": Key(int, None, nullable=True),
    "num_nextn_predict_layers": Key(int, 1, zero=True),
}

_LAYER_KEYS = {
    name: key for name, key in LAYER_KEYS.items() if name not in ("attention.wk", "attention.wv")
} | {
    "attention.wq_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_up": "self_attn.q_b_proj",
    "attention.wkv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_up": "self_attn.kv_b_proj",
}


def _problems(full: Full) -> Iterator[str]:
    yield from rope_problems(full)
    if full["first_k_dense_replace"] < full["num_hidden_layers"]:
        yield f"first_k_dense_replace = {full['first_k_dense_replace']}, layers with experts cannot be read"
    if full["num_nextn_predict_layers"]:
        yield f"num_nextn_predict_layers = {full['num_nextn_predict_layers']}, only 0 can be read"
    heads = full["num_key_value_heads"]
    if heads not in (None, full["num_attention_heads"]):
        yield f"num_key_value_heads = {heads}, only as many as num_attention_heads can be read"
    widths = {"head_dim": full["qk_rope_head_dim"]}
    widths["qk_head_dim"] = full["qk_nope_head_dim"] + full["qk_rope_head_dim"]
    for name, width in widths.items():
        if full[name] not in (None, width):
            yield f"{name} = {full[name]}, expected {width}, which follows from the widths of its parts"


def _mscale(rope: RopeConfig, all_dim: float) -> float:
    """What queries and keys are multiplied by each, as `yarn_get_mscale` of `transformers` computes it."""
    factor = rope.factor if isinstance(rope, YarnRopeConfig) else 1.0
    return 1.0 if factor <= 1 else 0.1 * all_dim * log(factor) + 1.0


def _scale(width: int, rope: RopeConfig, all_dim: float | None) -> float | None:
    """The factor of the scores; None if it is 1/sqrt(width)."""
    if not all_dim or not isinstance(rope, YarnRopeConfig):
        return None
    mscale = _mscale(rope, all_dim)
    return width**-0.5 * mscale * mscale


def _read(full: Full) -> DecoderConfig:
    rope = rope_from_hf(full)
    table = full.get("rope_scaling") or full.get("rope_parameters") or {}
    width = full["qk_nope_head_dim"] + full["qk_rope_head_dim"]
    attention = LatentConfig(
        num_heads=full["num_attention_heads"],
        kv_rank=full["kv_lora_rank"],
        q_rank=full["q_lora_rank"],
        nope_dim=full["qk_nope_head_dim"],
        rope_dim=full["qk_rope_head_dim"],
        value_dim=full["v_head_dim"],
        bias=full["attention_bias"],
        rope_pairs=full["rope_interleave"],
        scale=_scale(width, rope, table.get("mscale_all_dim")),
    )
    return decoder(full, attention, rope=rope)


def _write(config: DecoderConfig) -> dict[str, Any]:
    attention, rope = config.layer(0).attention, config.layer(0).rope
    if not isinstance(attention, LatentConfig):
        raise ModelError("attention other than mla")
    found = (
        outer_values(config)
        | gated_values(config)
        | {
            "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_heads,
            "kv_lora_rank": attention.kv_rank,
            "q_lora_rank": attention.q_rank,
            "qk_rope_head_dim": attention.rope_dim,
            "v_head_dim": attention.value_dim,
            "qk_nope_head_dim": attention.nope_dim,
            "rope_interleave": attention.rope_pairs,
            "attention_bias": attention.bias,
            "first_k_dense_replace": config.num_layers,
            "num_nextn_predict_layers": 0,
        }
    )
    if attention.scale is not None and isinstance(rope, YarnRopeConfig):
        found["rope_parameters"]["mscale_all_dim"] = _all_dim(attention, rope)
    return found


def _all_dim(attention: LatentConfig, rope: YarnRopeConfig) -> float:
    """The `mscale_all_dim` of which `transformers` makes exactly this scale, the shortest there is."""
    assert attention.scale is not None
    exact = ((attention.scale * attention.head_dim**0.5) ** 0.5 - 1) / (0.1 * log(rope.factor))
    shorter = (round(exact, digits) for digits in range(1, 17))
    return next((one for one in shorter if _scale(attention.head_dim, rope, one) == attention.scale), exact)


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    {},
    _KEYS,
    _LAYER_KEYS,
    _read,
    _write,
    _problems,
    old_keys=_OLD_KEYS,
)
