"""Phi-3 (arXiv:2404.14219): a Llama with one matrix for queries, keys and values, and one for gate and up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forge_model.decoder.config import DecoderConfig
from forge_model.hf.families.dense import Full, attention, decoder, values
from forge_model.hf.families.family import LAYER_KEYS, SHARED_KEYS, Family, Key, Packed
from forge_model.hf.families.glm4 import GATES
from forge_model.hf.rope import ORIGINAL, rope_from_hf, rope_problems, rotary_dim

_KEYS = {name: key for name, key in SHARED_KEYS.items() if name != "attention_bias"} | {
    "vocab_size": Key(int, 32064),
    "hidden_size": Key(int, 3072),
    "intermediate_size": Key(int, 8192),
    "num_key_value_heads": Key(int, None, nullable=True),
    "max_position_embeddings": Key(int, 4096),
    "rms_norm_eps": Key(float, 1e-5),
    "sliding_window": Key(int, None, nullable=True),
}


def _read(full: Full) -> DecoderConfig:
    width = full["head_dim"] or full["hidden_size"] // full["num_attention_heads"]
    part = rotary_dim(full, width)
    rope = rope_from_hf({**full, ORIGINAL: full.get(ORIGINAL) or 4096})
    return decoder(full, attention(full, sliding_window=full["sliding_window"], rope_dim=part), rope=rope)


def _problems(full: Full) -> Iterator[str]:
    yield from rope_problems(full, partial=True, kinds=("default", "longrope"))
    if (original := full.get(ORIGINAL)) is not None and (type(original) is not int or original < 2):
        yield f"{ORIGINAL} = {original!r}, expected an integer from 2"


def _write(config: DecoderConfig) -> dict[str, Any]:
    original = getattr(config.rope, "original_max_tokens", None)
    return values(config) | ({} if original is None else {ORIGINAL: original})


_4_MINI: dict[str, Any] = {
    "vocab_size": 200064,
    "max_tokens": 4096,
    "dim": 3072,
    "num_layers": 32,
    "tie_embeddings": True,
    "attention": {"num_heads": 24, "num_kv_heads": 8, "head_dim": 128, "rope_dim": 96},
    "ffn": {"dim": 8192},
}
"""The model before `longrope` extended its context; the published `config.json` has those factors."""

PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    {"phi3-3.8b": _4_MINI},
    _KEYS,
    {
        **LAYER_KEYS,
        **GATES,
        **{f"attention.w{name}": Packed("self_attn.qkv_proj", part, 3) for part, name in enumerate("qkv")},
    },
    _read,
    _write,
    _problems,
    {"head_dim": Key(int, None, nullable=True)},
    fixed={"hidden_act": "silu", "resid_pdrop": 0.0, "embd_pdrop": 0.0},
)
"""Without `longrope`, a model that rotates its full heads is exported as a Llama or a Mistral."""
