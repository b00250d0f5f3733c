"""DeepSeek-V3 (arXiv:2412.19437): latent attention, fine-grained and shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from typing import Any

from forge_config.registry import type_name

from forge_model.attention.config import AttentionConfig, LatentConfig
from forge_model.attention.rope_config import RopeConfig, YarnRopeConfig
from forge_model.decoder.config import DecoderConfig
from forge_model.decoder.mtp_config import MTPConfig
from forge_model.error import ModelError
from forge_model.hf.families.dense import Full, decoder, gated_values, outer_values
from forge_model.hf.families.family import SHARED_KEYS, Family, Key
from forge_model.hf.families.moe import EXPERT_KEYS, MOE_LAYER_KEYS, dense_layers, parts_of
from forge_model.hf.rope import rope_from_hf, rope_problems
from forge_model.moe.config import MoEConfig
from forge_model.moe.router_config import RouterConfig, SigmoidRouterConfig, TopKConfig

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
    "first_k_dense_replace": Key(int, 3, zero=True),
    "moe_intermediate_size": Key(int, 2048),
    "n_shared_experts": Key(int, 1, zero=True),
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

SHARED_EXPERTS = {
    f"ffn.shared.{ours}": f"mlp.shared_experts.{theirs}" for ours, theirs in EXPERT_KEYS.items()
}
MTP_KEYS = {
    "embed_norm": "enorm",
    "hidden_norm": "hnorm",
    "project": "eh_proj",
    "norm": "shared_head.norm",
}
LATENT_LAYER_KEYS = (
    MOE_LAYER_KEYS
    | SHARED_EXPERTS
    | {
        "attention.wq_down": "self_attn.q_a_proj",
        "attention.q_norm": "self_attn.q_a_layernorm",
        "attention.wq_up": "self_attn.q_b_proj",
        "attention.wkv_down": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.wkv_up": "self_attn.kv_b_proj",
    }
)


def latent_problems(full: Full) -> Iterator[str]:
    """Yield the problems with attention keys that have no counterpart here."""
    yield from rope_problems(full)
    heads = full["num_key_value_heads"]
    if heads not in (None, full["num_attention_heads"]):
        yield f"num_key_value_heads = {heads}, only as many as num_attention_heads can be read"
    parts = {"head_dim": ["qk_rope_head_dim"], "qk_head_dim": ["qk_nope_head_dim", "qk_rope_head_dim"]}
    for name, of in parts.items():
        width = sum(full[part] for part in of)
        if full[name] not in (None, width):
            yield f"{name} = {full[name]}, expected {width} of {' + '.join(of)}"


def _mscale(rope: RopeConfig, all_dim: float) -> float:
    """Return the factor on queries and on keys, as `yarn_get_mscale` of `transformers` computes it."""
    factor = rope.factor if isinstance(rope, YarnRopeConfig) else 1.0
    return 1.0 if factor <= 1 else 0.1 * all_dim * log(factor) + 1.0


def _scale(width: int, rope: RopeConfig, all_dim: float | None) -> float | None:
    """Return the factor on the scores; None if it is 1/sqrt(width)."""
    if not all_dim or not isinstance(rope, YarnRopeConfig):
        return None
    mscale = _mscale(rope, all_dim)
    return width**-0.5 * mscale * mscale


def latent(full: Full, rope: RopeConfig) -> LatentConfig:
    """Return the attention of every layer."""
    table = full.get("rope_scaling") or full.get("rope_parameters") or {}
    width = full["qk_nope_head_dim"] + full["qk_rope_head_dim"]
    return LatentConfig(
        num_heads=full["num_attention_heads"],
        kv_rank=full["kv_lora_rank"],
        q_rank=full["q_lora_rank"],
        nope_dim=full["qk_nope_head_dim"],
        rope_dim=full["qk_rope_head_dim"],
        value_dim=full["v_head_dim"],
        bias=full["attention_bias"],
        rope_pairs=full.get("rope_interleave", True),
        scale=_scale(width, rope, table.get("mscale_all_dim")),
    )


def _read(full: Full) -> DecoderConfig:
    rope = rope_from_hf(full)
    return with_experts(full, latent(full, rope), sigmoid(full), rope=rope, mtp=modules(full))


def modules(full: Full) -> MTPConfig:
    """Return the modules for multi-token prediction."""
    return MTPConfig(num_modules=full["num_nextn_predict_layers"])


def with_experts(
    full: Full, attention: AttentionConfig, router: RouterConfig, **options: Any
) -> DecoderConfig:
    """Return the model with experts in all layers except the first `first_k_dense_replace`."""
    dense, layers = full["first_k_dense_replace"], full["num_hidden_layers"]
    overrides = options.pop("overrides", [])
    if dense < layers:
        options["ffn"] = _experts(full, router)
        overrides = [*overrides, *dense_layers(range(dense), full["intermediate_size"])]
    return decoder(full, attention, overrides=overrides, **options)


def sigmoid(full: Full) -> SigmoidRouterConfig:
    """Return the router of DeepSeek-V3 and its successors."""
    return SigmoidRouterConfig(
        normalize=full["norm_topk_prob"],
        scale=full["routed_scaling_factor"],
        groups=full["n_group"],
        top_groups=full["topk_group"],
    )


def _experts(full: Full, router: RouterConfig) -> MoEConfig:
    return MoEConfig(
        dim=full["moe_intermediate_size"],
        num_experts=full["n_routed_experts"],
        top_k=full["num_experts_per_tok"],
        router=router,
        shared_experts=full["n_shared_experts"] or 0,
    )


def no_shared_experts(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Return the matrices of width 0 that `transformers` has if there are no shared experts, by shape."""
    found = {}
    for index in range(config.num_layers):
        ffn = config.layer(index).ffn
        if isinstance(ffn, MoEConfig) and not ffn.shared_experts:
            place = f"model.layers.{index}.mlp.shared_experts"
            found |= {f"{place}.{name}_proj.weight": (0, config.dim) for name in ("gate", "up")}
            found[f"{place}.down_proj.weight"] = (config.dim, 0)
    return found


def _write(config: DecoderConfig) -> dict[str, Any]:
    ahead = {"num_nextn_predict_layers": config.mtp.num_modules}
    return latent_values(config) | expert_values(config, SigmoidRouterConfig) | ahead


def latent_values(config: DecoderConfig) -> dict[str, Any]:
    """Return all keys of a `config.json` except those of the feed-forwards."""
    attention, rope = config.layer(0).attention, config.layer(0).rope
    if not isinstance(attention, LatentConfig):
        raise ModelError("attention other than mla")
    found = outer_values(config) | {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_heads,
        "kv_lora_rank": attention.kv_rank,
        "q_lora_rank": attention.q_rank,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "qk_nope_head_dim": attention.nope_dim,
        "rope_interleave": attention.rope_pairs,
        "attention_bias": attention.bias,
    }
    if attention.scale is not None and isinstance(rope, YarnRopeConfig):
        found["rope_parameters"]["mscale_all_dim"] = _all_dim(attention, rope)
    return found


def expert_values(config: DecoderConfig, of: type[TopKConfig]) -> dict[str, Any]:
    """Return the keys of experts, in all layers but the first ones, with routers of type `of`."""
    ffns = [config.layer(index).ffn for index in range(config.num_layers)]
    if not any(isinstance(one, MoEConfig) for one in ffns):
        return gated_values(config) | {"first_k_dense_replace": config.num_layers}
    experts, dense, plain = parts_of(config)
    router = experts.router
    if not isinstance(router, of):
        raise ModelError(f"a router other than {type_name(of)}")
    if dense != list(range(len(dense))):
        raise ModelError(f"layers {dense} are dense, which are not the first ones")
    hidden = experts.hidden(config.dim)
    return {
        "intermediate_size": hidden if plain is None else plain.hidden(config.dim),
        "first_k_dense_replace": len(dense),
        "moe_intermediate_size": hidden,
        "n_shared_experts": experts.shared_experts,
        "n_routed_experts": experts.num_experts,
        "routed_scaling_factor": router.scale,
        "n_group": router.groups,
        "topk_group": router.top_groups,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": router.normalize,
    }


def _all_dim(attention: LatentConfig, rope: YarnRopeConfig) -> float:
    """Return the shortest `mscale_all_dim` from which `transformers` computes exactly this scale."""
    assert attention.scale is not None
    exact = ((attention.scale * attention.head_dim**0.5) ** 0.5 - 1) / (0.1 * log(rope.factor))
    shorter = (round(exact, digits) for digits in range(1, 17))
    return next((one for one in shorter if _scale(attention.head_dim, rope, one) == attention.scale), exact)


_PRESETS: dict[str, dict[str, Any]] = {
    "deepseek_v3-671b": {
        "vocab_size": 129280,
        "dim": 7168,
        "num_layers": 61,
        "max_tokens": 4096,
        "norm": {"eps": 1e-6},
        "attention": {
            "type": "mla",
            "num_heads": 128,
            "kv_rank": 512,
            "q_rank": 1536,
            "nope_dim": 128,
            "rope_dim": 64,
            "value_dim": 128,
        },
        "ffn": {
            "type": "moe",
            "dim": 2048,
            "num_experts": 256,
            "top_k": 8,
            "shared_experts": 1,
            "router": {
                "type": "sigmoid",
                "scale": 2.5,
                "groups": 8,
                "top_groups": 4,
                "sequence_balance_weight": 1e-4,
            },
        },
        "overrides": [{"layers": "0:3", "ffn": {"type": "swiglu", "dim": 18432}}],
    }
}

DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _PRESETS,
    _KEYS,
    LATENT_LAYER_KEYS,
    _read,
    _write,
    latent_problems,
    old_keys=_OLD_KEYS,
    expert_keys=EXPERT_KEYS,
    mtp_keys=MTP_KEYS,
    empty=no_shared_experts,
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
)
