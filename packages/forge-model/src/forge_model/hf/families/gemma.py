"""Gemma 2 and the text model of Gemma 3 (arXiv:2408.00118, arXiv:2503.19786)."""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose
from typing import Any, NamedTuple

from forge_model.decoder.config import DecoderConfig
from forge_model.error import ModelError
from forge_model.ffn.config import GeGLUConfig
from forge_model.hf.families.dense import (
    FULL,
    SLIDING,
    Full,
    attention,
    decoder,
    problems_of_types,
    sliding,
    type_problems,
    values,
)
from forge_model.hf.families.family import LAYER_KEYS, SHARED_KEYS, Family, Key
from forge_model.hf.families.two_ropes import two_rope_problems, two_ropes, two_ropes_to_hf
from forge_model.hf.rope import rope_from_hf
from forge_model.norm_config import RMSNormConfig

_SHARED_KEYS = SHARED_KEYS | {
    "hidden_size": Key(int, 2304),
    "intermediate_size": Key(int, 9216),
    "num_hidden_layers": Key(int, 26),
    "num_attention_heads": Key(int, 8),
    "num_key_value_heads": Key(int, 4),
    "head_dim": Key(int, 256),
    "tie_word_embeddings": Key(bool, True),
    "query_pre_attn_scalar": Key(int, 256),
    "sliding_window": Key(int, 4096, nullable=True),
    "layer_types": Key(list, None, nullable=True),
}
_GEMMA2_KEYS = _SHARED_KEYS | {
    "vocab_size": Key(int, 256000),
    "max_position_embeddings": Key(int, 8192),
    "final_logit_softcapping": Key(float, 30.0, nullable=True),
    "attn_logit_softcapping": Key(float, 50.0, nullable=True),
}
_GEMMA3_KEYS = _SHARED_KEYS | {
    "vocab_size": Key(int, 262208),
    "max_position_embeddings": Key(int, 131072),
    "final_logit_softcapping": Key(float, None, nullable=True),
}
_GEMMA3_OLD_KEYS = {"rope_local_base_freq": Key(float, 10000.0), "sliding_window_pattern": Key(int, 6)}
_FIXED = {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False}

_LAYER_KEYS = LAYER_KEYS | {
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}


def _types(full: Full, period: int) -> list[str]:
    """Return the kind of each layer: every `period`-th sees all tokens, unless `layer_types` is set."""
    layer_types = full["layer_types"]
    if layer_types is not None:
        return layer_types
    return [SLIDING if (index + 1) % period else FULL for index in range(full["num_hidden_layers"])]


def _types2(full: Full) -> list[str]:
    return _types(full, 2)


def _types3(full: Full) -> list[str]:
    return _types(full, full["sliding_window_pattern"])


def _read(full: Full, types: list[str], attention: Any, rope: Any, local_rope: Any = None) -> DecoderConfig:
    return decoder(
        full,
        attention,
        ffn=GeGLUConfig(dim=full["intermediate_size"]),
        norm=RMSNormConfig(eps=full["rms_norm_eps"], zero_centered=True),
        rope=rope,
        norm_order="sandwich",
        embedding_scale=full["hidden_size"] ** 0.5,
        logit_softcap=full["final_logit_softcapping"],
        overrides=sliding(types, attention, full["sliding_window"], rope=local_rope),
    )


def _scale(full: Full) -> float:
    return full["query_pre_attn_scalar"] ** -0.5


def _read2(full: Full) -> DecoderConfig:
    capped = attention(full, scale=_scale(full), softcap=full["attn_logit_softcapping"])
    return _read(full, _types2(full), capped, rope_from_hf(full))


def _read3(full: Full) -> DecoderConfig:
    normed = attention(full, scale=_scale(full), qk_norm=True)
    return _read(full, _types3(full), normed, *two_ropes(full, full["rope_local_base_freq"]))


def _problems3(full: Full) -> Iterator[str]:
    yield from type_problems(full, _types3(full), full["sliding_window"], "sliding_window")
    yield from two_rope_problems(full, full["rope_local_base_freq"])


def _write(config: DecoderConfig) -> dict[str, Any]:
    found = values(config)
    scale = getattr(config.layer(0).attention, "scale", None)
    scalar = found["head_dim"] if scale is None else max(round(scale**-2), 1)
    if scale is not None and not isclose(scalar**-0.5, scale, rel_tol=1e-12):
        raise ModelError(f"attention.scale = {scale} is no 1/sqrt of an integer")
    if found["sliding_window"] is None:  # transformers makes a mask of it even if no layer has one
        del found["sliding_window"]
    return found | {
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": getattr(config.layer(0).attention, "softcap", None),
        "final_logit_softcapping": config.logit_softcap,
    }


def _write3(config: DecoderConfig) -> dict[str, Any]:
    return two_ropes_to_hf(config, _write(config))


class _Shape(NamedTuple):
    """The sizes of one model; `heads` are the query heads, the key-value heads and the head dim."""

    dim: int
    num_layers: int
    heads: tuple[int, int, int]
    hidden: int
    scalar: int


def _preset(
    shape: _Shape, period: int, window: int, attention: dict[str, Any], full: dict[str, Any], **model: Any
) -> dict[str, Any]:
    """Return the keys of `[model]`; `full` has further parts of the layers that see all tokens."""
    num_heads, kv_heads, width = shape.heads
    attention = attention | {"num_heads": num_heads, "num_kv_heads": kv_heads, "head_dim": width}
    attention |= {"scale": shape.scalar**-0.5}
    return {
        "dim": shape.dim,
        "num_layers": shape.num_layers,
        "tie_embeddings": True,
        "attention": attention | {"sliding_window": window},
        "ffn": {"type": "geglu", "dim": shape.hidden},
        "norm": {"eps": 1e-6, "zero_centered": True},
        "norm_order": "sandwich",
        "embedding_scale": shape.dim**0.5,
        "overrides": [{"layers": f"{period - 1}::{period}", "attention": attention, **full}],
        **model,
    }


def _gemma2(shape: _Shape) -> dict[str, Any]:
    outer = {"vocab_size": 256000, "max_tokens": 8192, "logit_softcap": 30.0}
    return _preset(shape, 2, 4096, {"softcap": 50.0}, {}, **outer)


def _gemma3(shape: _Shape, window: int, factor: float | None) -> dict[str, Any]:
    rope: dict[str, Any] = {"theta": 1e6}
    if factor is not None:
        rope |= {"type": "linear", "factor": factor}
    vocabulary, longest = (262144, 32768) if factor is None else (262208, 131072)
    outer = {"vocab_size": vocabulary, "max_tokens": longest}
    return _preset(shape, 6, window, {"qk_norm": True}, {"rope": rope}, rope={"theta": 10000.0}, **outer)


_GEMMA2_PRESETS = {
    "gemma2-2.6b": _gemma2(_Shape(2304, 26, (8, 4, 256), 9216, 256)),
    "gemma2-9b": _gemma2(_Shape(3584, 42, (16, 8, 256), 14336, 256)),
    "gemma2-27b": _gemma2(_Shape(4608, 46, (32, 16, 128), 36864, 144)),
}
_GEMMA3_PRESETS = {
    "gemma3-1b": _gemma3(_Shape(1152, 26, (4, 1, 256), 6912, 256), 512, None),
    "gemma3-4b": _gemma3(_Shape(2560, 34, (8, 4, 256), 10240, 256), 1024, 8.0),
    "gemma3-12b": _gemma3(_Shape(3840, 48, (16, 8, 256), 15360, 256), 1024, 8.0),
    "gemma3-27b": _gemma3(_Shape(5376, 62, (32, 16, 128), 21504, 168), 1024, 8.0),
}

GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    _GEMMA2_PRESETS,
    _GEMMA2_KEYS,
    _LAYER_KEYS,
    _read2,
    _write,
    problems_of_types(_types2, lambda full: full["sliding_window"], "sliding_window"),
    fixed=_FIXED,
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _GEMMA3_PRESETS,
    _GEMMA3_KEYS,
    _LAYER_KEYS | {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"},
    _read3,
    _write3,
    _problems3,
    _GEMMA3_OLD_KEYS,
    _FIXED | {"attn_logit_softcapping": None},
    theta=1e6,
)
