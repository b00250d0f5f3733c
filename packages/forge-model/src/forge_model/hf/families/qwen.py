"""Dense Qwen2, Qwen2.5 and Qwen3 (arXiv:2412.15115, arXiv:2505.09388)."""

from typing import Any

from forge_model.decoder.config import DecoderConfig
from forge_model.hf.families.dense import (
    FULL,
    SLIDING,
    Full,
    attention,
    decoder,
    problems_of_types,
    sliding,
    values,
)
from forge_model.hf.families.family import LARGE, LAYER_KEYS, SHARED_KEYS, SMALL, Family, Key, presets

ORIGINALS: dict[str, dict[str, Any]] = {
    "0.6b": {
        "dim": 1024,
        "num_layers": 28,
        "tie_embeddings": True,
        "attention": {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128},
        "ffn": {"dim": 3072},
    },
    "1.7b": {
        "dim": 2048,
        "num_layers": 28,
        "tie_embeddings": True,
        "attention": {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128},
        "ffn": {"dim": 6144},
    },
    "4b": {
        "dim": 2560,
        "num_layers": 36,
        "tie_embeddings": True,
        "attention": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
        "ffn": {"dim": 9728},
    },
    "8b": {
        "dim": 4096,
        "num_layers": 36,
        "attention": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
        "ffn": {"dim": 12288},
    },
    "14b": {
        "dim": 5120,
        "num_layers": 40,
        "attention": {"num_heads": 40, "num_kv_heads": 8, "head_dim": 128},
        "ffn": {"dim": 17408},
    },
    "32b": {
        "dim": 5120,
        "num_layers": 64,
        "attention": {"num_heads": 64, "num_kv_heads": 8, "head_dim": 128},
        "ffn": {"dim": 25600},
    },
}
"""The published sizes of Qwen3; the other presets have the shapes of the Llama presets with their name."""

_SHARED: dict[str, Any] = {
    "max_tokens": 32768,
    "rope": {"theta": 1000000.0},
    "norm": {"eps": 1e-6},
    "attention": {"qk_norm": True},
}

_QWEN2_SIZES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "dim": 896,
        "num_layers": 24,
        "tie_embeddings": True,
        "attention": {"num_heads": 14, "num_kv_heads": 2},
        "ffn": {"dim": 4864},
    },
    "1.5b": {
        "dim": 1536,
        "num_layers": 28,
        "tie_embeddings": True,
        "attention": {"num_heads": 12, "num_kv_heads": 2},
        "ffn": {"dim": 8960},
    },
    "3b": {
        "dim": 2048,
        "num_layers": 36,
        "tie_embeddings": True,
        "attention": {"num_heads": 16, "num_kv_heads": 2},
        "ffn": {"dim": 11008},
    },
}
_QWEN2_LARGE: dict[str, dict[str, Any]] = {
    "7b": {
        "dim": 3584,
        "num_layers": 28,
        "attention": {"num_heads": 28, "num_kv_heads": 4},
        "ffn": {"dim": 18944},
    },
    "14b": {
        "dim": 5120,
        "num_layers": 48,
        "attention": {"num_heads": 40, "num_kv_heads": 8},
        "ffn": {"dim": 13824},
    },
    "32b": {
        "dim": 5120,
        "num_layers": 64,
        "attention": {"num_heads": 40, "num_kv_heads": 8},
        "ffn": {"dim": 27648},
    },
    "72b": {
        "dim": 8192,
        "num_layers": 80,
        "attention": {"num_heads": 64, "num_kv_heads": 8},
        "ffn": {"dim": 29568},
    },
}
"""The published sizes of Qwen2.5."""

_KEYS = {name: key for name, key in SHARED_KEYS.items() if name != "attention_bias"} | {
    "vocab_size": Key(int, 151936),
    "intermediate_size": Key(int, 22016),
    "num_key_value_heads": Key(int, 32, nullable=True),
    "max_position_embeddings": Key(int, 32768),
    "use_sliding_window": Key(bool, False),
    "sliding_window": Key(int, 4096, nullable=True),
    "max_window_layers": Key(int, 28, zero=True),
    "layer_types": Key(list, None, nullable=True),
}


def _types(full: Full) -> list[str]:
    """Return the kind of attention of each layer, as `Qwen3Config` decides it."""
    layer_types = full["layer_types"]
    if layer_types is not None:
        return layer_types
    first = full["max_window_layers"] if _window(full) is not None else full["num_hidden_layers"]
    return [SLIDING if index >= first else FULL for index in range(full["num_hidden_layers"])]


def _window(full: Full) -> int | None:
    return full["sliding_window"] if full["use_sliding_window"] else None


def _read(full: Full, **options: Any) -> DecoderConfig:
    base, window = attention(full, **options), _window(full)
    return decoder(full, base, overrides=[] if window is None else sliding(_types(full), base, window))


def _read2(full: Full) -> DecoderConfig:
    return _read(full, bias=True)


def _read3(full: Full) -> DecoderConfig:
    return _read(full, qk_norm=True)


_problems = problems_of_types(_types, _window, "use_sliding_window and sliding_window")
_QWEN2_SHARED = _SHARED | {"attention": {"bias": True}}

QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    presets("qwen2", _QWEN2_SIZES, vocab_size=151936, **_QWEN2_SHARED)
    | presets("qwen2", _QWEN2_LARGE, vocab_size=152064, **_QWEN2_SHARED),
    _KEYS,
    LAYER_KEYS,
    _read2,
    values,
    _problems,
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    presets("qwen3", SMALL, vocab_size=50304, **_SHARED)
    | presets("qwen3", LARGE | ORIGINALS, vocab_size=151936, **_SHARED),
    _KEYS | {"head_dim": Key(int, 128), "attention_bias": Key(bool, False)},
    LAYER_KEYS | {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"},
    _read3,
    values,
    _problems,
)
