"""GLM-4 (arXiv:2406.12793): sandwich norms, half of each head rotated in pairs, gate and up fused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forge_model.decoder.config import DecoderConfig
from forge_model.hf.families.dense import Full, attention, decoder, values
from forge_model.hf.families.family import LAYER_KEYS, SHARED_KEYS, Family, Key, Packed
from forge_model.hf.rope import rope_problems, rotary_dim

_KEYS = SHARED_KEYS | {
    "vocab_size": Key(int, 151552),
    "intermediate_size": Key(int, 13696),
    "num_hidden_layers": Key(int, 40),
    "num_key_value_heads": Key(int, 2),
    "head_dim": Key(int, 128),
    "max_position_embeddings": Key(int, 131072),
    "rms_norm_eps": Key(float, 0.00000015625),
    "attention_bias": Key(bool, True),
}
PARTIAL = {"partial_rotary_factor": Key(float, 0.5, nullable=True)}
"""The key for the rotated part of a head, with the default of GLM models."""

GATES: dict[str, Packed] = {
    "ffn.w_gate": Packed("mlp.gate_up_proj", 0, 2),
    "ffn.w_up": Packed("mlp.gate_up_proj", 1, 2),
}
"""Gate and up projections in one matrix."""


def _read(full: Full) -> DecoderConfig:
    part = rotary_dim(full, full["head_dim"])
    return decoder(
        full,
        attention(full, output_bias=False, rope_dim=part, rope_pairs=True),
        norm_order="sandwich",
    )


def partial_problems(full: Full) -> Iterator[str]:
    """Yield the problems of a family that rotates a part of each head."""
    yield from rope_problems(full, partial=True)


def with_part(found: dict[str, Any]) -> dict[str, Any]:
    """Add the key for the rotated part of a head, also if that is all of it."""
    return found | {"rope_parameters": {"partial_rotary_factor": 1.0} | found["rope_parameters"]}


def _write(config: DecoderConfig) -> dict[str, Any]:
    return with_part(values(config))


_9B: dict[str, Any] = {
    "vocab_size": 151552,
    "max_tokens": 32768,
    "dim": 4096,
    "num_layers": 40,
    "attention": {"num_heads": 32, "num_kv_heads": 2, "head_dim": 128, "rope_dim": 64, "rope_pairs": True},
    "ffn": {"dim": 13696},
    "norm": {"eps": 1e-5},
    "norm_order": "sandwich",
}

GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    {"glm4-9b": _9B},
    _KEYS,
    LAYER_KEYS
    | GATES
    | {"attention_post_norm": "post_self_attn_layernorm", "ffn_post_norm": "post_mlp_layernorm"},
    _read,
    _write,
    partial_problems,
    PARTIAL,
)
