"""OLMo 2 (arXiv:2501.00656): reordered norms, queries and keys normalized over all heads."""

from typing import Any

from forge_model.decoder.config import DecoderConfig
from forge_model.hf.families.dense import Full, attention, decoder, values
from forge_model.hf.families.family import LAYER_KEYS, SHARED_KEYS, Family, Key, presets
from forge_model.hf.rope import rope_problems

_SIZES: dict[str, dict[str, Any]] = {
    "7b": {
        "dim": 4096,
        "num_layers": 32,
        "attention": {"num_heads": 32},
        "ffn": {"dim": 11008},
    },
    "13b": {
        "dim": 5120,
        "num_layers": 40,
        "attention": {"num_heads": 40},
        "ffn": {"dim": 13824},
    },
    "32b": {
        "dim": 5120,
        "num_layers": 64,
        "attention": {"num_heads": 40, "num_kv_heads": 8},
        "ffn": {"dim": 27648},
    },
}

_KEYS = SHARED_KEYS | {
    "vocab_size": Key(int, 50304),
    "intermediate_size": Key(int, 11008),
    "num_key_value_heads": Key(int, None, nullable=True),
    "max_position_embeddings": Key(int, 2048),
    "rms_norm_eps": Key(float, 1e-5),
}

_LAYER_KEYS = {name: key for name, key in LAYER_KEYS.items() if not name.endswith("_norm")} | {
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}


def _read(full: Full) -> DecoderConfig:
    normed = attention(full, qk_norm=True, qk_norm_over="projection")
    return decoder(full, normed, norm_order="reordered")


OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    presets(
        "olmo2",
        _SIZES,
        vocab_size=100352,
        max_tokens=4096,
        norm_order="reordered",
        norm={"eps": 1e-6},
        rope={"theta": 500000.0},
        attention={"qk_norm": True, "qk_norm_over": "projection"},
    ),
    _KEYS,
    _LAYER_KEYS,
    _read,
    values,
    rope_problems,
)
