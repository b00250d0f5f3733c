"""OLMo 3 (arXiv:2512.13961): three layers with a window, then one without; each kind has its own rope."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forge_model.decoder.config import DecoderConfig
from forge_model.hf.families.dense import (
    FULL,
    SLIDING,
    Full,
    attention,
    decoder,
    sliding,
    type_problems,
    values,
)
from forge_model.hf.families.family import SHARED_KEYS, Family, Key
from forge_model.hf.families.olmo import OLMO2
from forge_model.hf.families.two_ropes import two_rope_problems, two_ropes, two_ropes_to_hf

_THETA = 500000.0
_KEYS = SHARED_KEYS | {
    "vocab_size": Key(int, 50304),
    "intermediate_size": Key(int, 11008),
    "num_key_value_heads": Key(int, None, nullable=True),
    "max_position_embeddings": Key(int, 2048),
    "rms_norm_eps": Key(float, 1e-5),
    "sliding_window": Key(int, 4096, nullable=True),
    "layer_types": Key(list, None, nullable=True),
}


def _types(full: Full) -> list[str]:
    """Return the kind of each layer: every fourth sees all tokens, unless `layer_types` is set."""
    if full["layer_types"] is not None:
        return full["layer_types"]
    return [SLIDING if (index + 1) % 4 else FULL for index in range(full["num_hidden_layers"])]


def _read(full: Full) -> DecoderConfig:
    sees_all = attention(full, qk_norm=True, qk_norm_over="projection")
    rope, local = two_ropes(full, _THETA)
    windows = sliding(_types(full), sees_all, full["sliding_window"], rope=local)
    return decoder(full, sees_all, norm_order="reordered", rope=rope, overrides=windows)


def _problems(full: Full) -> Iterator[str]:
    yield from type_problems(full, _types(full), full["sliding_window"], "sliding_window")
    yield from two_rope_problems(full, _THETA)


def _write(config: DecoderConfig) -> dict[str, Any]:
    found = two_ropes_to_hf(config, values(config))
    if found["sliding_window"] is None:  # transformers makes a mask of it even if no layer has one
        del found["sliding_window"]
    return found


_HEADS = {"num_heads": 32, "qk_norm": True, "qk_norm_over": "projection"}
_YARN = {"type": "yarn", "theta": _THETA, "factor": 8.0, "original_max_tokens": 8192}
_7B: dict[str, Any] = {
    "vocab_size": 100278,
    "max_tokens": 65536,
    "dim": 4096,
    "num_layers": 32,
    "attention": _HEADS | {"sliding_window": 4096},
    "ffn": {"dim": 11008},
    "norm": {"eps": 1e-6},
    "norm_order": "reordered",
    "rope": {"theta": _THETA},
    "overrides": [{"layers": "3::4", "attention": _HEADS, "rope": _YARN}],
}

OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    {"olmo3-7b": _7B},
    _KEYS,
    OLMO2.layer_keys,
    _read,
    _write,
    _problems,
    theta=_THETA,
)
