"""Between `[model]` and the `config.json` of a Hugging Face checkpoint. Imports no torch.

A key of a `config.json` that changes what is computed is understood or refused. A key that is absent means
what the config class of `transformers` 5.23 says (`Family.keys`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from forge_config import plain

from forge_model.attention_config import GroupedQueryConfig
from forge_model.decoder_config import DecoderConfig, LayerOverride
from forge_model.error import ModelError
from forge_model.families import FAMILIES, Family
from forge_model.ffn_config import SwiGLUConfig
from forge_model.hf_rope import ROPE_KEYS, rope_from_hf, rope_problems, rope_to_hf
from forge_model.norm_config import RMSNormConfig

FIXED: dict[str, Any] = {
    "attention_dropout": 0,
    "hidden_act": "silu",
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_interleaved": False,
}
"""Keys that can be read with this value only, unless the family understands them."""

HARMLESS = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_flash_attn_2_enabled",
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "cls_token_id",
        "decoder_start_token_id",
        "do_sample",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "is_llama_config",
        "label2id",
        "max_length",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "task_specific_params",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    ]
)
"""Keys that change nothing of what a decoder computes."""

FULL, SLIDING = "full_attention", "sliding_attention"


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """The model that a `config.json` describes.

    Raises:
        ModelError: an unknown model type, or keys that we cannot follow; lists them all.
    """
    family = next((family for family in FAMILIES if family.model_type == hf.get("model_type")), None)
    if family is None:
        known = ", ".join(family.model_type for family in FAMILIES)
        raise ModelError(f"given model_type {hf.get('model_type')!r}; expected one of {known}")
    full = {name: key.default for name, key in family.keys.items()} | dict(hf)
    problems = [*_problems(hf, family)]
    problems = problems or [*_layer_problems(full), *rope_problems(full)]
    try:
        if not problems:
            return _decoder(full, family)
    except ValueError as error:
        problems = [str(error)]
    raise ModelError(f"this config.json of a {family.model_type} cannot be read: {'; '.join(problems)}")


def _decoder(full: Mapping[str, Any], family: Family) -> DecoderConfig:
    attention = GroupedQueryConfig(
        num_heads=full["num_attention_heads"],
        num_kv_heads=full["num_key_value_heads"],
        head_dim=full["head_dim"],
        qk_norm=family.qk_norm,
        bias=full["attention_bias"],
        output_bias=full["attention_bias"],
    )
    return DecoderConfig(
        vocab_size=full["vocab_size"],
        max_tokens=full["max_position_embeddings"],
        dim=full["hidden_size"],
        num_layers=full["num_hidden_layers"],
        tie_embeddings=full["tie_word_embeddings"],
        init_std=full["initializer_range"],
        attention=attention,
        ffn=SwiGLUConfig(dim=full["intermediate_size"], bias=full.get("mlp_bias", False)),
        norm=RMSNormConfig(eps=full["rms_norm_eps"]),
        rope=rope_from_hf(full),
        overrides=_sliding_layers(full, attention),
    )


def _problems(hf: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Keys that are not known, or have values that are not."""
    for name, value in hf.items():
        key = family.keys.get(name)
        if key is not None:
            if not key.accepts(value):
                yield f"{name} = {value!r}, expected {key.kind.__name__}"
        elif name in FIXED:
            if value not in (FIXED[name], None):
                yield f"{name} = {value!r}, only {FIXED[name]!r} can be read"
        elif value is not None and name not in HARMLESS and name not in ROPE_KEYS:
            yield f"{name} = {value!r} is not known"


def _layer_types(full: Mapping[str, Any]) -> list[str]:
    """The kind of attention of each layer, as `Qwen3Config` decides it."""
    given = full.get("layer_types")
    if given is not None:
        return given
    first = full["max_window_layers"] if _window(full) is not None else full["num_hidden_layers"]
    return [SLIDING if index >= first else FULL for index in range(full["num_hidden_layers"])]


def _window(full: Mapping[str, Any]) -> int | None:
    return full["sliding_window"] if full.get("use_sliding_window") else None


def _layer_problems(full: Mapping[str, Any]) -> Iterator[str]:
    types = _layer_types(full)
    if len(types) != full["num_hidden_layers"]:
        yield f"layer_types names {len(types)} layers, num_hidden_layers = {full['num_hidden_layers']}"
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        yield f"layer_types {unknown}, only {FULL} and {SLIDING} can be read"
    if SLIDING in types and _window(full) is None:
        yield f"layer_types has {SLIDING} without use_sliding_window and sliding_window"


def _sliding_layers(full: Mapping[str, Any], attention: GroupedQueryConfig) -> list[LayerOverride]:
    """One override for each run of layers with a window."""
    window = _window(full)
    if window is None:
        return []
    sliding = GroupedQueryConfig(
        **{
            name: getattr(attention, name) for name in attention.__struct_fields__ if name != "sliding_window"
        },
        sliding_window=window,
    )
    runs = [
        (kind, [i for i, _ in run]) for kind, run in groupby(enumerate(_layer_types(full)), lambda e: e[1])
    ]
    return [
        LayerOverride(layers=f"{run[0]}:{run[-1] + 1}", attention=sliding)
        for kind, run in runs
        if kind == SLIDING
    ]


def family_of(config: DecoderConfig) -> Family:
    """The family whose checkpoints can hold this model.

    Raises:
        ModelError: no family can; lists what stands in the way.
    """
    obstacles = [*_foreign_parts(config)] or [*_foreign_layers(config)] or [*_foreign_options(config)]
    if obstacles:
        raise ModelError(f"no Hugging Face family can hold this model: {'; '.join(obstacles)}")
    qk_norm = getattr(config.layer(0).attention, "qk_norm", False)
    return next(family for family in FAMILIES if family.qk_norm == qk_norm)


def _foreign_parts(config: DecoderConfig) -> Iterator[str]:
    layers = [config.layer(index) for index in range(config.num_layers)]
    if any(not isinstance(layer.attention, GroupedQueryConfig) for layer in layers):
        yield "attention other than full grouped-query"
    if any(not isinstance(layer.ffn, SwiGLUConfig) for layer in layers):
        yield "a feed-forward other than swiglu"
    if any(not isinstance(norm, RMSNormConfig) for norm in (config.norm, *(one.norm for one in layers))):
        yield "a norm other than rmsnorm"


def _foreign_layers(config: DecoderConfig) -> Iterator[str]:
    layers = [config.layer(index) for index in range(config.num_layers)]
    if any(_without_window(layer) != _without_window(layers[0]) for layer in layers):
        yield "layers differ in more than their sliding_window"
    if any(layer.norm != config.norm for layer in layers):
        yield "the layers have another norm than the last hidden state"
    if len({layer.attention.window for layer in layers} - {None}) > 1:
        yield "windows of several lengths"


def _foreign_options(config: DecoderConfig) -> Iterator[str]:
    first = config.layer(0)
    attention, ffn = first.attention, first.ffn
    assert isinstance(attention, GroupedQueryConfig) and isinstance(ffn, SwiGLUConfig)
    if attention.bias != attention.output_bias:
        yield "Llama and Qwen3 have biases on all four attention projections or on none"
    if attention.qk_norm and ffn.bias:
        yield "Qwen3 has no biases in its feed-forward; set ffn.bias = false"
    windows = [config.layer(index).attention.window for index in range(config.num_layers)]
    if not attention.qk_norm and any(windows):
        yield "Llama has full grouped-query attention only; leave out sliding_window"


def _without_window(layer: Any) -> dict[str, Any]:
    tree = plain(layer)
    tree["attention"].pop("sliding_window", None)
    return tree


def config_to_hf(
    config: DecoderConfig,
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> dict[str, Any]:
    """The `config.json` of a checkpoint of this model.

    Args:
        config: of the model.
        bos_token_id: what the tokenizer puts before a document; None is written as null, for otherwise
            `transformers` assumes the ids of Llama 2.
        eos_token_id: what ends a document.
        pad_token_id: what fills rows up.

    Raises:
        ModelError: no family can hold it.
    """
    family = family_of(config)
    first = config.layer(0)
    attention, ffn = first.attention, first.ffn
    assert isinstance(attention, GroupedQueryConfig) and isinstance(ffn, SwiGLUConfig)
    windows = [config.layer(index).attention.window for index in range(config.num_layers)]
    window = next((one for one in windows if one is not None), None)
    values = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": ffn.hidden(config.dim),
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.rotary_dim(config.dim),
        "max_position_embeddings": config.max_tokens,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm.eps,
        "attention_bias": attention.bias,
        "mlp_bias": ffn.bias,
        "tie_word_embeddings": config.tie_embeddings,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": [FULL if one is None else SLIDING for one in windows],
    }
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{name: value for name, value in values.items() if name in family.keys},
        "hidden_act": "silu",
        "rope_theta": first.rope.theta,
        "rope_parameters": rope_to_hf(first.rope),
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
    }


def read_config(folder: Path | str) -> dict[str, Any]:
    """The `config.json` of a folder.

    Raises:
        ModelError: there is none, or it is no JSON object.
    """
    path = Path(folder) / "config.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read: {error}; expected a folder of a Hugging Face model"
        ) from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds {type(found).__name__}; expected a JSON object")
    return found


def model_tree(folder: Path | str) -> dict[str, Any]:
    """The keys of `[model]` for the model in a folder, every default filled in.

    Raises:
        ModelError: there is no `config.json`, or it cannot be followed.
    """
    try:
        tree = plain(config_from_hf(read_config(folder)))
    except ModelError as error:
        raise ModelError(f"from = {str(folder)!r}: {error}") from None
    return {key: value for key, value in tree.items() if key != "type"}
