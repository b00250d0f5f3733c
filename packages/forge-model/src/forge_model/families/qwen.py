"""Qwen3, dense (arXiv:2505.09388)."""

from typing import Any

from forge_model.families.family import LARGE, LAYER_KEYS, SHARED_KEYS, SMALL, Family, Key, presets

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
"""The published sizes; the other presets borrow the shapes of the Llama presets of their name."""

_SHARED: dict[str, Any] = {
    "max_tokens": 32768,
    "rope": {"theta": 1000000.0},
    "norm": {"eps": 1e-6},
    "attention": {"qk_norm": True},
}

_KEYS = SHARED_KEYS | {
    "vocab_size": Key(int, 151936),
    "intermediate_size": Key(int, 22016),
    "num_key_value_heads": Key(int, 32, nullable=True),
    "head_dim": Key(int, 128),
    "max_position_embeddings": Key(int, 32768),
    "use_sliding_window": Key(bool, False),
    "sliding_window": Key(int, 4096, nullable=True),
    "max_window_layers": Key(int, 28),
    "layer_types": Key(list, None, nullable=True),
}

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    presets("qwen3", SMALL, vocab_size=50304, **_SHARED)
    | presets("qwen3", LARGE | ORIGINALS, vocab_size=151936, **_SHARED),
    _KEYS,
    LAYER_KEYS | {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"},
    qk_norm=True,
)
