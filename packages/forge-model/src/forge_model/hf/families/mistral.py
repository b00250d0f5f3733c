"""Mistral 7B (arXiv:2310.06825): every layer has a sliding window."""

from typing import Any

from forge_model.decoder.config import DecoderConfig
from forge_model.hf.families.dense import Full, attention, decoder, values
from forge_model.hf.families.family import LAYER_KEYS, SHARED_KEYS, Family, Key, presets
from forge_model.hf.rope import rope_problems

_7B: dict[str, Any] = {
    "dim": 4096,
    "num_layers": 32,
    "vocab_size": 32000,
    "max_tokens": 32768,
    "attention": {"num_heads": 32, "num_kv_heads": 8, "sliding_window": 4096},
    "ffn": {"dim": 14336},
}

_KEYS = {name: key for name, key in SHARED_KEYS.items() if name != "attention_bias"} | {
    "vocab_size": Key(int, 32000),
    "intermediate_size": Key(int, 14336),
    "num_key_value_heads": Key(int, 8, nullable=True),
    "head_dim": Key(int, None, nullable=True),
    "max_position_embeddings": Key(int, 131072),
    "sliding_window": Key(int, 4096, nullable=True),
}


def _read(full: Full) -> DecoderConfig:
    return decoder(full, attention(full, sliding_window=full["sliding_window"]))


MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    presets("mistral", {"7b": _7B}),
    _KEYS,
    LAYER_KEYS,
    _read,
    values,
    rope_problems,
)
