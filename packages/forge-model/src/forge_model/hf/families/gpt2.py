"""GPT-2 (Radford et al. 2019): learned positions, layer norms, matrices stored transposed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forge_model.attention.config import GroupedQueryConfig
from forge_model.attention.rope_config import NoRopeConfig
from forge_model.decoder.config import DecoderConfig
from forge_model.error import ModelError
from forge_model.ffn.config import MLPConfig
from forge_model.hf.families.dense import Full, decoder
from forge_model.hf.families.family import Family, Key, Packed
from forge_model.hf.families.gpt_neox import ACTIVATIONS
from forge_model.norm_config import LayerNormConfig

_SUMMARY = {"summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"}
_FIRST = {"n_special", "predict_special_tokens", "output_past", "gradient_checkpointing", "_num_labels"}
"""Keys of the first published files that no version of `transformers` uses in the computation."""
_KEYS = {
    "vocab_size": Key(int, 50257),
    "n_positions": Key(int, 1024),
    "n_embd": Key(int, 768),
    "n_layer": Key(int, 12),
    "n_head": Key(int, 12),
    "n_inner": Key(int, None, nullable=True),
    "activation_function": Key(str, "gelu_new"),
    "layer_norm_epsilon": Key(float, 1e-5),
    "initializer_range": Key(float, 0.02),
    "scale_attn_weights": Key(bool, True),
    "tie_word_embeddings": Key(bool, True),
    "resid_pdrop": Key(float, 0.1, zero=True),
    "embd_pdrop": Key(float, 0.1, zero=True),
    "attn_pdrop": Key(float, 0.1, zero=True),
    "summary_first_dropout": Key(float, 0.1, zero=True),
}
"""Dropout is not applied here: it changes how a model is trained, not what it computes."""


def _read(full: Full) -> DecoderConfig:
    shape = {
        "hidden_size": full["n_embd"],
        "num_hidden_layers": full["n_layer"],
        "max_position_embeddings": full["n_positions"],
    }
    scale = None if full["scale_attn_weights"] else 1.0
    return decoder(
        {**full, **shape},
        GroupedQueryConfig(num_heads=full["n_head"], bias=True, output_bias=True, scale=scale),
        ffn=MLPConfig(
            dim=full["n_inner"] or 4 * full["n_embd"],
            bias=True,
            activation=ACTIVATIONS[full["activation_function"]],  # type: ignore[arg-type]
        ),
        norm=LayerNormConfig(eps=full["layer_norm_epsilon"], bias=True),
        rope=NoRopeConfig(),
        learned_positions=True,
    )


def _problems(full: Full) -> Iterator[str]:
    if full["activation_function"] not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        yield f"activation_function = {full['activation_function']!r}, only {known} can be read"
    if full["n_embd"] % full["n_head"]:
        yield f"n_embd = {full['n_embd']} is no multiple of n_head"


def _write(config: DecoderConfig) -> dict[str, Any]:
    layer = config.layer(0)
    if not isinstance(config.norm, LayerNormConfig):
        raise ModelError("a norm other than layernorm")
    if not isinstance(layer.ffn, MLPConfig):
        raise ModelError("a feed-forward other than mlp")
    if not isinstance(layer.attention, GroupedQueryConfig):
        raise ModelError("attention other than grouped-query")
    act = next(name for name, ours in ACTIVATIONS.items() if ours == layer.ffn.activation)
    return {
        "vocab_size": config.vocab_size,
        "n_positions": config.max_tokens,
        "n_embd": config.dim,
        "n_layer": config.num_layers,
        "n_head": layer.attention.num_heads,
        "n_inner": layer.ffn.hidden(config.dim),
        "activation_function": act,
        "layer_norm_epsilon": config.norm.eps,
        "initializer_range": config.init_std,
        "scale_attn_weights": layer.attention.scale is None,
        "tie_word_embeddings": config.tie_embeddings,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def _shape(dim: int, num_layers: int) -> dict[str, Any]:
    return {
        "vocab_size": 50257,
        "max_tokens": 1024,
        "dim": dim,
        "num_layers": num_layers,
        "tie_embeddings": True,
        "learned_positions": True,
        "rope": {"type": "none"},
        "attention": {"num_heads": dim // 64, "bias": True, "output_bias": True},
        "ffn": {"type": "mlp", "dim": 4 * dim, "bias": True, "activation": "gelu_tanh"},
        "norm": {"type": "layernorm", "bias": True},
    }


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    {"gpt2-124m": _shape(768, 12), "gpt2-355m": _shape(1024, 24), "gpt2-774m": _shape(1280, 36)},
    _KEYS,
    {"attention_norm": "ln_1", "ffn_norm": "ln_2"}
    | {
        ours: Packed(theirs, transposed=True)
        for ours, theirs in (
            ("attention.wo", "attn.c_proj"),
            ("ffn.w_up", "mlp.c_fc"),
            ("ffn.w_down", "mlp.c_proj"),
        )
    }
    | {f"attention.w{n}": Packed("attn.c_attn", part, 3, transposed=True) for part, n in enumerate("qkv")},
    _read,
    _write,
    _problems,
    {name: Key(object, None, nullable=True) for name in _SUMMARY | _FIRST},
    fixed=dict.fromkeys(
        ("scale_attn_by_inverse_layer_idx", "add_cross_attention", "reorder_and_upcast_attn"), False
    ),
    aliases={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "n_ctx": "n_positions",
    },
    outer_keys={
        "embed": "transformer.wte",
        "position_embed": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    layers="transformer.h",
    base="transformer.",
    unused=r"\.attn\.(masked_)?bias$",
)
"""Older checkpoints have buffers of masks, `attn.bias`, and names without the prefix `transformer.`."""
