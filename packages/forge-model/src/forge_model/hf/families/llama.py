"""Llama 2 and 3 (arXiv:2307.09288, arXiv:2407.21783)."""

from forge_model.decoder.config import DecoderConfig
from forge_model.hf.families.dense import Full, attention, decoder, values
from forge_model.hf.families.family import LARGE, LAYER_KEYS, SHARED_KEYS, SMALL, Family, Key, presets
from forge_model.hf.rope import rope_problems


def _llama3_rope(factor: float) -> dict[str, object]:
    return {"type": "llama3", "theta": 500000.0, "factor": factor}


_presets = presets("llama", SMALL, vocab_size=50304, max_tokens=2048)
for _size, _shape in LARGE.items():
    _factor = 32.0 if _size in ("1b", "3b") else 8.0
    _presets |= presets(
        "llama", {_size: _shape}, vocab_size=128256, max_tokens=131072, rope=_llama3_rope(_factor)
    )

_KEYS = SHARED_KEYS | {
    "vocab_size": Key(int, 32000),
    "intermediate_size": Key(int, 11008),
    "num_key_value_heads": Key(int, None, nullable=True),
    "head_dim": Key(int, None, nullable=True),
    "max_position_embeddings": Key(int, 2048),
    "mlp_bias": Key(bool, False),
}


def _read(full: Full) -> DecoderConfig:
    return decoder(full, attention(full))


LLAMA = Family("llama", "LlamaForCausalLM", _presets, _KEYS, LAYER_KEYS, _read, values, rope_problems)
