"""SmolLM3 (huggingface.co/blog/smollm3): a Llama in which every fourth layer has no positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forge_model.attention.rope_config import NoRopeConfig
from forge_model.decoder.config import DecoderConfig, LayerOverride
from forge_model.hf.families.dense import (
    FULL,
    SLIDING,
    Full,
    attention,
    decoder,
    runs,
    sliding,
    type_problems,
    values,
)
from forge_model.hf.families.family import LAYER_KEYS, SHARED_KEYS, Family, Key
from forge_model.hf.rope import rope_problems, rope_to_hf

_KEYS = SHARED_KEYS | {
    "vocab_size": Key(int, 128256),
    "hidden_size": Key(int, 2048),
    "intermediate_size": Key(int, 11008),
    "num_hidden_layers": Key(int, 36),
    "num_attention_heads": Key(int, 16),
    "num_key_value_heads": Key(int, 4, nullable=True),
    "max_position_embeddings": Key(int, 32768),
    "tie_word_embeddings": Key(bool, True),
    "mlp_bias": Key(bool, False),
    "use_sliding_window": Key(bool, False),
    "sliding_window": Key(int, None, nullable=True),
    "no_rope_layers": Key(list, None, nullable=True),
    "no_rope_layer_interval": Key(int, 4),
    "layer_types": Key(list, None, nullable=True),
}


def _rotates(full: Full) -> list[bool]:
    """Return for each layer whether it has positions."""
    layers, flags = range(full["num_hidden_layers"]), full["no_rope_layers"]
    if flags is None:
        return [bool((index + 1) % full["no_rope_layer_interval"]) for index in layers]
    return [bool(one) for one in flags[: len(layers)]]


def _window(full: Full) -> int | None:
    return full["sliding_window"] if full["use_sliding_window"] else None


def _types(full: Full) -> list[str]:
    """Return the kind of each layer: those without positions have a window, unless `layer_types` is set."""
    if full["layer_types"] is not None:
        return full["layer_types"]
    return [FULL if one or _window(full) is None else SLIDING for one in _rotates(full)]


def _read(full: Full) -> DecoderConfig:
    base, window = attention(full), _window(full)
    overrides = [] if window is None else sliding(_types(full), base, window)
    if still := [index for index, rotates in enumerate(_rotates(full)) if not rotates]:
        overrides.append(LayerOverride(layers=runs(still), rope=NoRopeConfig()))
    return decoder(full, base, overrides=overrides)


def _problems(full: Full) -> Iterator[str]:
    flags, layers = full["no_rope_layers"], full["num_hidden_layers"]
    if flags is not None and (len(flags) < layers or not all(isinstance(one, int) for one in flags)):
        yield f"no_rope_layers = {flags!r}, expected a number for each of num_hidden_layers = {layers}"
        return
    yield from type_problems(full, _types(full), _window(full), "use_sliding_window and sliding_window")
    yield from rope_problems(full)


def _write(config: DecoderConfig) -> dict[str, Any]:
    ropes = [config.layer(index).rope for index in range(config.num_layers)]
    rope = next((one for one in ropes if one.rotates), config.rope)
    return values(config) | {
        "rope_theta": rope.theta,
        "rope_parameters": rope_to_hf(rope),
        "no_rope_layers": [int(one.rotates) for one in ropes],
    }


_3B: dict[str, Any] = {
    "vocab_size": 128256,
    "max_tokens": 65536,
    "dim": 2048,
    "num_layers": 36,
    "tie_embeddings": True,
    "attention": {"num_heads": 16, "num_kv_heads": 4},
    "ffn": {"dim": 11008},
    "norm": {"eps": 1e-6},
    "rope": {"theta": 5e6},
    "overrides": [{"layers": "3::4", "rope": {"type": "none"}}],
}

SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    {"smollm3-3b": _3B},
    _KEYS,
    LAYER_KEYS,
    _read,
    _write,
    _problems,
    theta=2000000.0,
)
