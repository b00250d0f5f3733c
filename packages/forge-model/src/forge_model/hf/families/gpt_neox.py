"""GPT-NeoX (arXiv:2204.06745) and Pythia (arXiv:2304.01373): parallel residual connections, layer norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forge_model.attention.config import GroupedQueryConfig
from forge_model.decoder.block_config import BlockConfig, ResidualBlockConfig, StandardBlockConfig
from forge_model.decoder.config import DecoderConfig
from forge_model.error import ModelError
from forge_model.ffn.config import MLPConfig
from forge_model.hf.families.dense import Full, attention_values, decoder, shape_values
from forge_model.hf.families.family import SHARED_KEYS, Family, Key, Packed
from forge_model.hf.rope import rope_from_hf, rope_problems, rotary_dim
from forge_model.norm_config import LayerNormConfig

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
"""Activations, their names to ours; the first of their names for one of ours is written."""

_THETA = 10000.0
_KEYS = {name: key for name, key in SHARED_KEYS.items() if name != "rms_norm_eps"} | {
    "vocab_size": Key(int, 50432),
    "hidden_size": Key(int, 6144),
    "num_hidden_layers": Key(int, 44),
    "num_attention_heads": Key(int, 64),
    "intermediate_size": Key(int, 24576),
    "hidden_act": Key(str, "gelu"),
    "max_position_embeddings": Key(int, 2048),
    "layer_norm_eps": Key(float, 1e-5),
    "use_parallel_residual": Key(bool, True),
    "attention_bias": Key(bool, True),
    "is_decoder": Key(bool, False),
}
"""`is_decoder` changes nothing: the class is a decoder with any value of it."""
_OLD_KEYS = {"rotary_pct": Key(float, 0.25, zero=True), "rotary_emb_base": Key(float, _THETA)}


def _with_rope(full: Full) -> dict[str, Any]:
    """Return the keys with the rotary keys under the names that other families use."""
    return {**full, "rope_theta": full["rotary_emb_base"], "partial_rotary_factor": full["rotary_pct"]}


def _read(full: Full) -> DecoderConfig:
    keys, biased, heads = _with_rope(full), full["attention_bias"], full["num_attention_heads"]
    part = rotary_dim(keys, full["hidden_size"] // heads)
    block: BlockConfig = ResidualBlockConfig(parallel=True)
    return decoder(
        full,
        GroupedQueryConfig(num_heads=heads, bias=biased, output_bias=biased, rope_dim=part),
        ffn=MLPConfig(
            dim=full["intermediate_size"],
            bias=True,
            activation=ACTIVATIONS[full["hidden_act"]],  # type: ignore[arg-type]
        ),
        norm=LayerNormConfig(eps=full["layer_norm_eps"], bias=True),
        block=block if full["use_parallel_residual"] else StandardBlockConfig(),
        rope=rope_from_hf(keys),
    )


def _problems(full: Full) -> Iterator[str]:
    for name, value, own in (
        ("rope_theta", _THETA, "rotary_emb_base"),
        ("partial_rotary_factor", None, "rotary_pct"),
    ):
        if full.get(name) not in (value, None):
            yield f"{name} = {full[name]!r} outside of rope_parameters, where this family has {own}"
    if full["hidden_act"] not in ACTIVATIONS:
        yield f"hidden_act = {full['hidden_act']!r}, only {', '.join(ACTIVATIONS)} can be read"
    if full["hidden_size"] % full["num_attention_heads"]:
        yield f"hidden_size = {full['hidden_size']} is no multiple of num_attention_heads"
    yield from rope_problems(_with_rope(full), partial=True)


def _write(config: DecoderConfig) -> dict[str, Any]:
    layer, found = config.layer(0), shape_values(config)
    if not isinstance(config.norm, LayerNormConfig):
        raise ModelError("a norm other than layernorm")
    if not isinstance(layer.ffn, MLPConfig):
        raise ModelError("a feed-forward other than mlp")
    act = next(name for name, ours in ACTIVATIONS.items() if ours == layer.ffn.activation)
    table = {"partial_rotary_factor": 1.0} | found["rope_parameters"]
    heads = attention_values(config)
    return found | {
        "num_attention_heads": heads["num_attention_heads"],
        "attention_bias": heads["attention_bias"],
        "intermediate_size": layer.ffn.hidden(config.dim),
        "hidden_act": act,
        "layer_norm_eps": config.norm.eps,
        "use_parallel_residual": getattr(layer.block, "parallel", False),
        "rope_parameters": table,
        "rope_theta": None,
    }


_20B: dict[str, Any] = {
    "vocab_size": 50432,
    "max_tokens": 2048,
    "dim": 6144,
    "num_layers": 44,
    "attention": {"num_heads": 64, "bias": True, "output_bias": True, "rope_dim": 24},
    "ffn": {"type": "mlp", "bias": True},
    "norm": {"type": "layernorm", "bias": True},
    "block": {"type": "residual", "parallel": True},
}

GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    {"gpt_neox-20b": _20B},
    _KEYS,
    {
        "attention_norm": "input_layernorm",
        "attention.wo": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn.w_up": "mlp.dense_h_to_4h",
        "ffn.w_down": "mlp.dense_4h_to_h",
    }
    | {
        f"attention.w{name}": Packed("attention.query_key_value", part, 3, "head")
        for part, name in enumerate("qkv")
    },
    _read,
    _write,
    _problems,
    _OLD_KEYS,
    fixed={"hidden_dropout": 0.0},
    outer_keys={"embed": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
    layers="gpt_neox.layers",
)
