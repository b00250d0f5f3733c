"""Gemma 1 (arXiv:2403.08295)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forge_model.decoder.config import DecoderConfig
from forge_model.ffn.config import GeGLUConfig
from forge_model.hf.families.dense import Full, attention, decoder, values
from forge_model.hf.families.family import LAYER_KEYS, SHARED_KEYS, Family, Key
from forge_model.hf.rope import rope_problems
from forge_model.norm_config import RMSNormConfig

_ACT = "gelu_pytorch_tanh"
_KEYS = SHARED_KEYS | {
    "vocab_size": Key(int, 256000),
    "hidden_size": Key(int, 3072),
    "intermediate_size": Key(int, 24576),
    "num_hidden_layers": Key(int, 28),
    "num_attention_heads": Key(int, 16),
    "num_key_value_heads": Key(int, 16),
    "head_dim": Key(int, 256),
    "max_position_embeddings": Key(int, 8192),
    "tie_word_embeddings": Key(bool, True),
    "hidden_act": Key(str, _ACT),
}


def _read(full: Full) -> DecoderConfig:
    return decoder(
        full,
        attention(full),
        ffn=GeGLUConfig(dim=full["intermediate_size"]),
        norm=RMSNormConfig(eps=full["rms_norm_eps"], zero_centered=True),
        embedding_scale=full["hidden_size"] ** 0.5,
    )


def _problems(full: Full) -> Iterator[str]:
    if full["hidden_act"] not in (_ACT, "gelu"):  # the old name, which `transformers` takes for the same
        yield f"hidden_act = {full['hidden_act']!r}, only {_ACT!r} can be read"
    yield from rope_problems(full)


def _write(config: DecoderConfig) -> dict[str, Any]:
    return values(config) | {"hidden_act": _ACT}


def _preset(dim: int, num_layers: int, heads: tuple[int, int], hidden: int) -> dict[str, Any]:
    return {
        "vocab_size": 256000,
        "max_tokens": 8192,
        "dim": dim,
        "num_layers": num_layers,
        "tie_embeddings": True,
        "attention": {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 256},
        "ffn": {"type": "geglu", "dim": hidden},
        "norm": {"eps": 1e-6, "zero_centered": True},
        "embedding_scale": dim**0.5,
    }


GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    {
        "gemma-2b": _preset(2048, 18, (8, 1), 16384),
        "gemma-7b": _preset(3072, 28, (16, 16), 24576),
    },
    _KEYS,
    LAYER_KEYS,
    _read,
    _write,
    _problems,
    fixed={"hidden_activation": _ACT, "use_bidirectional_attention": False},
)
