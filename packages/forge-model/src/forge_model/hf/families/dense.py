"""Conversion of keys that families share, and of models with grouped-query attention and gated FFNs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from forge_model.attention.config import AttentionConfig, GroupedQueryConfig
from forge_model.decoder.config import DecoderConfig, LayerOverride
from forge_model.error import ModelError
from forge_model.ffn.config import SwiGLUConfig
from forge_model.hf.rope import rope_from_hf, rope_problems, rope_to_hf
from forge_model.norm_config import RMSNormConfig

FULL, SLIDING = "full_attention", "sliding_attention"

Full = Mapping[str, Any]
"""A `config.json` with all defaults."""


def attention(full: Full, **options: Any) -> GroupedQueryConfig:
    """Return the attention of a layer that sees all tokens; `options` replace values of the shared keys."""
    biased = full.get("attention_bias", False)
    shared = {
        "num_heads": full["num_attention_heads"],
        "num_kv_heads": full["num_key_value_heads"],
        "head_dim": full.get("head_dim"),
        "bias": biased,
        "output_bias": biased,
    }
    return GroupedQueryConfig(**(shared | options))


def decoder(full: Full, attention: AttentionConfig, **options: Any) -> DecoderConfig:
    """Build the config; `options` replace values of the shared keys."""
    shared = {
        "vocab_size": full["vocab_size"],
        "max_tokens": full["max_position_embeddings"],
        "dim": full["hidden_size"],
        "num_layers": full["num_hidden_layers"],
        "tie_embeddings": full["tie_word_embeddings"],
        "init_std": full["initializer_range"],
        "attention": attention,
    }
    if "norm" not in options:
        shared["norm"] = RMSNormConfig(eps=full["rms_norm_eps"])
    if "ffn" not in options:
        shared["ffn"] = SwiGLUConfig(dim=full["intermediate_size"], bias=full.get("mlp_bias", False))
    if "rope" not in options:
        shared["rope"] = rope_from_hf(full)
    return DecoderConfig(**(shared | options))


def sliding(
    types: Sequence[str], attention: GroupedQueryConfig, window: int, **parts: Any
) -> list[LayerOverride]:
    """Return the overrides for layers with a window; empty if there are none."""
    layers = runs([index for index, kind in enumerate(types) if kind == SLIDING])
    if not layers:
        return []
    return [LayerOverride(layers=layers, attention=replace(attention, sliding_window=window), **parts)]


def runs(indices: Sequence[int]) -> str:
    """Return layers in the notation of `LayerOverride`: [0, 1, 4] is "0:2,4:5"."""
    grouped = groupby(enumerate(indices), lambda pair: pair[1] - pair[0])
    found = [[index for _, index in run] for _, run in grouped]
    return ",".join(f"{run[0]}:{run[-1] + 1}" for run in found)


def type_problems(full: Full, types: Sequence[str], window: int | None, needs: str) -> Iterator[str]:
    """Yield problems with the kinds of the layers; `needs` names the keys that set the window."""
    if len(types) != full["num_hidden_layers"]:
        yield f"layer_types names {len(types)} layers, num_hidden_layers = {full['num_hidden_layers']}"
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        yield f"layer_types {unknown}, only {FULL} and {SLIDING} can be read"
    if SLIDING in types and window is None:
        yield f"layer_types has {SLIDING} without {needs}"


def problems_of_types(
    types_of: Callable[[Full], Sequence[str]], window_of: Callable[[Full], int | None], needs: str
) -> Callable[[Full], Iterator[str]]:
    """Return the function `problems` of a family whose layers have kinds."""

    def problems(full: Full) -> Iterator[str]:
        yield from type_problems(full, types_of(full), window_of(full), needs)
        yield from rope_problems(full)

    return problems


def values(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of a `config.json` that families share, from the first layer where layers differ.

    Raises:
        ModelError: the first layer has parts of kinds that these keys cannot describe.
    """
    return outer_values(config) | gated_values(config) | attention_values(config)


def gated_values(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of a gated feed-forward."""
    ffn = config.layer(0).ffn
    if not isinstance(ffn, SwiGLUConfig):
        raise ModelError("a feed-forward other than swiglu or geglu")
    return {"intermediate_size": ffn.hidden(config.dim), "mlp_bias": ffn.bias}


def outer_values(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys that do not depend on the layers."""
    if not isinstance(config.norm, RMSNormConfig):
        raise ModelError("a norm other than rmsnorm")
    return shape_values(config) | {"rms_norm_eps": config.norm.eps}


def shape_values(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys that depend neither on the layers nor on the norms."""
    rope = config.layer(0).rope
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.max_tokens,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": rope.theta,
        "rope_parameters": rope_to_hf(rope) | _part_of(config),
    }


def _part_of(config: DecoderConfig) -> dict[str, Any]:
    """Return the key for partially rotated heads, if they are."""
    attention = config.layer(0).attention
    if not isinstance(attention, GroupedQueryConfig) or attention.rope_dim is None:
        return {}
    return {"partial_rotary_factor": attention.rope_dim / attention.head_width(config.dim)}


def attention_values(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of grouped-query attention and of its windows."""
    attention = config.layer(0).attention
    if not isinstance(attention, GroupedQueryConfig):
        raise ModelError("attention other than grouped-query")
    windows = [config.layer(index).attention.window for index in range(config.num_layers)]
    window = next((one for one in windows if one is not None), None)
    return {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_width(config.dim),
        "attention_bias": attention.bias,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": [FULL if one is None else SLIDING for one in windows],
    }
