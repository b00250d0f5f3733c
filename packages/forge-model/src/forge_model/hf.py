"""Between our decoders and Hugging Face checkpoints: configuration and names, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from forge_model.config import (
    DecoderConfig,
    GroupedQueryConfig,
    RMSNormConfig,
    SwiGLUConfig,
)
from forge_model.error import ModelError
from forge_model.families import FAMILIES, Family
from forge_model.rope_config import LinearRopeConfig, Llama3RopeConfig, RopeConfig, YarnRopeConfig

V = TypeVar("V")


def family_of(config: DecoderConfig) -> Family:
    """The family whose checkpoints can hold this model.

    Raises:
        ModelError: no family can; names what stands in the way.
    """
    attention = config.attention
    obstacles = []
    if not isinstance(attention, GroupedQueryConfig) or attention.sliding_window is not None:
        obstacles.append("attention other than full grouped-query")
    if not isinstance(config.ffn, SwiGLUConfig):
        obstacles.append("a feed-forward other than swiglu")
    if not isinstance(config.norm, RMSNormConfig):
        obstacles.append("a norm other than rmsnorm")
    if obstacles:
        raise ModelError(f"no Hugging Face family can hold {', '.join(obstacles)}")
    assert isinstance(attention, GroupedQueryConfig)
    if attention.bias != attention.output_bias or (attention.bias and attention.qk_norm):
        raise ModelError("Hugging Face Llama has biases on all four attention projections or on none")
    if attention.qk_norm and config.ffn.bias:
        raise ModelError("Hugging Face Qwen3 has no biases in its feed-forward; set ffn.bias = false")
    return next(family for family in FAMILIES if family.qk_norm == attention.qk_norm)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` of a checkpoint of this model.

    Raises:
        ModelError: no family can hold it.
    """
    family = family_of(config)
    attention, ffn = config.attention, config.ffn
    assert isinstance(attention, GroupedQueryConfig) and isinstance(ffn, SwiGLUConfig)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": ffn.hidden(config.dim),
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.rotary_dim(config.dim),
        "hidden_act": "silu",
        "max_position_embeddings": config.max_tokens,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm.eps,
        "attention_bias": attention.bias,
        "mlp_bias": ffn.bias,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope.theta,
        "rope_parameters": _rope_to_hf(config.rope),
    }


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """The model that a `config.json` describes.

    Raises:
        ModelError: an unknown model type, or a feature that we do not have.
    """
    family = next((family for family in FAMILIES if family.model_type == hf.get("model_type")), None)
    if family is None:
        known = ", ".join(family.model_type for family in FAMILIES)
        raise ModelError(f"given model_type {hf.get('model_type')!r}; expected one of {known}")
    if hf.get("hidden_act", "silu") != "silu":
        raise ModelError(f"given hidden_act {hf['hidden_act']!r}; only silu can be read")
    if hf.get("use_sliding_window"):
        raise ModelError("a sliding window on some layers only cannot be read yet")
    bias = bool(hf.get("attention_bias", False))
    return DecoderConfig(
        vocab_size=hf["vocab_size"],
        max_tokens=hf["max_position_embeddings"],
        dim=hf["hidden_size"],
        num_layers=hf["num_hidden_layers"],
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        init_std=hf.get("initializer_range", 0.02),
        attention=GroupedQueryConfig(
            num_heads=hf["num_attention_heads"],
            num_kv_heads=hf.get("num_key_value_heads"),
            head_dim=hf.get("head_dim"),
            qk_norm=family.qk_norm,
            bias=bias,
            output_bias=bias,
        ),
        ffn=SwiGLUConfig(dim=hf["intermediate_size"], bias=bool(hf.get("mlp_bias", False))),
        norm=RMSNormConfig(eps=hf["rms_norm_eps"]),
        rope=_rope_from_hf(hf),
    )


def _rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    given: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": "default"}
    if isinstance(rope, LinearRopeConfig):
        return given | {"rope_type": "linear", "factor": rope.factor}
    if isinstance(rope, Llama3RopeConfig):
        return given | {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_tokens,
        }
    if isinstance(rope, YarnRopeConfig):
        return given | {
            "rope_type": "yarn",
            "factor": rope.factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "original_max_position_embeddings": rope.original_max_tokens,
        }
    return given


def _rope_from_hf(hf: Mapping[str, Any]) -> RopeConfig:
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = float(given.get("rope_theta", hf.get("rope_theta", 10000.0)))
    kind = given.get("rope_type", given.get("type", "default"))
    original = given.get("original_max_position_embeddings", hf["max_position_embeddings"])
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return LinearRopeConfig(theta=theta, factor=given["factor"])
    if kind == "llama3":
        return Llama3RopeConfig(
            theta=theta,
            factor=given["factor"],
            low_freq_factor=given["low_freq_factor"],
            high_freq_factor=given["high_freq_factor"],
            original_max_tokens=original,
        )
    if kind == "yarn" and not {"mscale", "attention_factor"} & {k for k, v in given.items() if v is not None}:
        return YarnRopeConfig(
            theta=theta,
            factor=given["factor"],
            beta_fast=given.get("beta_fast") or 32.0,
            beta_slow=given.get("beta_slow") or 1.0,
            original_max_tokens=original,
        )
    raise ModelError(f"given rope {dict(given)!r}; expected default, linear, llama3, or plain yarn")


def to_hf(tensors: Mapping[str, V], config: DecoderConfig) -> dict[str, V]:
    """Our parameters under their names; a tied head is left out, as `save_pretrained` does.

    Raises:
        ModelError: a parameter has no counterpart.
    """
    family, renamed = family_of(config), {}
    for name, tensor in tensors.items():
        if config.tie_embeddings and name == "head.weight":
            continue
        try:
            renamed[family.hf_key(name)] = tensor
        except KeyError:
            raise ModelError(f"{name} has no counterpart in a {family.model_type} checkpoint") from None
    return renamed


def from_hf(tensors: Mapping[str, V], config: DecoderConfig) -> dict[str, V]:
    """Their parameters under our names.

    Raises:
        ModelError: a tensor is missing, or one is left over; lists them all.
    """
    import torch

    with torch.device("meta"):
        ours = list(dict(config.build().named_parameters()))
    family = family_of(config)
    wanted = {family.hf_key(name): name for name in ours}
    ignorable = {"lm_head.weight"} if config.tie_embeddings else set()
    missing = sorted(wanted.keys() - tensors.keys())
    extra = sorted(tensors.keys() - wanted.keys() - ignorable)
    if missing or extra:
        raise ModelError(
            f"not a checkpoint of this model: missing {missing or 'nothing'}, left over {extra or 'nothing'}"
        )
    return {name: tensors[key] for key, name in wanted.items()}
