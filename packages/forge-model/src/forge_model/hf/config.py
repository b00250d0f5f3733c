"""Conversion between `[model]` and the `config.json` of a Hugging Face checkpoint. Imports no torch.

A key of a `config.json` that changes the computation is understood or refused. An absent key has the default
of the config class of `transformers` 5.23 (`Family.keys`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any

from forge_config import plain
from msgspec.structs import replace

from forge_model.decoder.compare import differences
from forge_model.decoder.config import DecoderConfig
from forge_model.error import ModelError
from forge_model.hf.families import FAMILIES, Family
from forge_model.hf.rope import ROPE_KEYS
from forge_model.model_config import ModelConfig

FIXED: dict[str, Any] = {
    "attention_dropout": 0,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_interleaved": False,
    "use_mrope": False,
}
"""Keys that are accepted only with this value, unless the family reads them."""

SAME = {"swish": "silu"}
"""Values with the same meaning as another."""

NAMES = {
    "dim": ("hidden_size", "n_embd"),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "num_experts": ("n_routed_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok",),
    "groups": ("n_group",),
    "top_groups": ("topk_group",),
    "rope_dim": ("qk_rope_head_dim",),
    "num_modules": ("num_nextn_predict_layers",),
    "max_tokens": ("max_position_embeddings",),
    "rope_theta": ("rope_local_base_freq", "rotary_emb_base"),
    "partial_rotary_factor": ("rotary_pct",),
}
"""Keys of `[model]`, and their possible names in a `config.json`."""

HARMLESS = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_flash_attn_2_enabled",
        "_name_or_path",
        "_sliding_window_pattern",
        "architectures",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "classifier_dropout",
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
        "output_router_logits",
        "pad_token_id",
        "problem_type",
        "pruned_heads",
        "return_dict",
        "router_aux_loss_coef",
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
        "use_bfloat16",
        "use_cache",
    ]
)
"""Keys that do not change the result of a decoder."""


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the model that a `config.json` describes.

    Raises:
        ModelError: an unknown model type, or keys that cannot be read; lists them all.
    """
    family = next((family for family in FAMILIES if family.model_type == hf.get("model_type")), None)
    if family is None:
        known = ", ".join(family.model_type for family in FAMILIES)
        raise ModelError(f"given model_type {hf.get('model_type')!r}; expected one of {known}")
    given = hf
    hf, problems = _unaliased(given, family)
    keys = family.keys | family.old_keys
    full = {"rope_theta": family.theta} | {name: key.default for name, key in keys.items()} | dict(hf)
    problems += [*_problems(hf, family)]
    problems = problems or [*family.problems(full)]
    try:
        if not problems:
            return family.read(full)
    except ValueError as error:
        problems = [str(error)]
    message = f"this config.json of a {family.model_type} cannot be read: {'; '.join(problems)}"
    raise ModelError(message + _other_names(message, given, family))


def _other_names(message: str, given: Mapping[str, Any], family: Family) -> str:
    """Return the names that the file uses for the keys of `[model]` in an error message."""
    words, known = {*re.findall(r"\w+", message)}, family.keys | family.old_keys
    others = [(name, one) for name, keys in NAMES.items() for one in keys if one in known]
    others += [(name, alias) for alias, name in family.aliases.items() if alias in given]
    names = [f"{name} is {other}" for name, other in others if name in words and other not in words]
    return f" (here {', '.join(names)})" if names else ""


def _unaliased(hf: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    """Return the keys by their canonical names, and the keys that contradict each other."""
    canonical = {name: value for name, value in hf.items() if name not in family.aliases}
    problems = []
    for alias, name in family.aliases.items():
        if alias in hf and canonical.setdefault(name, hf[alias]) != hf[alias]:
            problems.append(f"{alias} = {hf[alias]!r} and {name} = {canonical[name]!r} mean the same")
    return canonical, problems


def _problems(hf: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yield keys that are unknown or have unexpected values."""
    keys, fixed = family.keys | family.old_keys, FIXED | family.fixed
    for name, value in hf.items():
        key = keys.get(name)
        if key is not None:
            if not key.accepts(value):
                yield f"{name} = {value!r}, expected {key.kind.__name__}"
        elif name in fixed:
            if value not in (fixed[name], None) and SAME.get(str(value), value) != fixed[name]:
                yield f"{name} = {value!r}, only {fixed[name]!r} can be read"
        elif value is not None and name not in HARMLESS and name not in ROPE_KEYS:
            yield f"{name} = {value!r} is not known"


def families_of(config: DecoderConfig) -> Iterator[tuple[Family, dict[str, Any]]]:
    """Yield the families whose checkpoints can hold this model, each with the keys of its `config.json`.

    A family can hold it if its `config.json` describes the same model. The order is that of `FAMILIES`.

    Raises:
        ModelError: no family can; the message names the differences to the nearest one.
    """
    obstacles: dict[str, tuple[float, list[str]]] = {}
    for family in FAMILIES:
        try:
            keys = _keys(family, config)
            found = differences(config, config_from_hf(keys))
        except ModelError as error:
            found, apart = [str(error)], inf  # it has no words for some part, so it is not near
        else:
            apart = len(found)
            if not found:
                yield family, keys
        obstacles.setdefault("; ".join(found), (apart, []))[1].append(family.model_type)
    if "" in obstacles:
        return
    fewest = min(count for count, _ in obstacles.values())
    nearest = [f"\n  {', '.join(of)}: {what}" for what, (count, of) in obstacles.items() if count == fewest]
    raise ModelError(f"no Hugging Face family can hold this model; what stands in the way:{''.join(nearest)}")


def _keys(family: Family, config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of a `config.json` that shape the model."""
    known = {*family.keys, *family.old_keys, *ROPE_KEYS}
    written = {name: value for name, value in family.write(config).items() if name in known}
    fixed = {name: value for name, value in family.fixed.items() if value is not None}
    return {"architectures": [family.architecture], "model_type": family.model_type, **written, **fixed}


def config_to_hf(
    config: DecoderConfig,
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> dict[str, Any]:
    """Return the `config.json` of a checkpoint of this model.

    Args:
        config: configuration of the model.
        bos_token_id: token that begins a document; None is written as null, because `transformers` otherwise
            assumes the ids of Llama 2.
        eos_token_id: token that ends a document.
        pad_token_id: token that pads rows.

    Raises:
        ModelError: no family can hold it.
    """
    ids = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
    return next(families_of(config))[1] | ids


def require_weights_of(config: ModelConfig, hf: Mapping[str, Any], place: str) -> DecoderConfig:
    """Check that weights belong to exactly this model.

    Args:
        config: `[model]`.
        hf: the `config.json` beside the weights.
        place: where the weights are, for the message.

    Returns:
        `config`.

    Raises:
        ModelError: they belong to another model; lists every difference.
    """
    if not isinstance(config, DecoderConfig):
        raise ModelError(f"{place} holds weights of a decoder; [model] is a {type(config).__name__}")
    other = config_from_hf(hf)
    if not config.mtp.num_modules:  # modules for multi-token prediction may be left out
        other = replace(other, mtp=config.mtp)
    found = differences(config, other)
    if found:
        listed = "".join(f"\n  {line}" for line in found)
        raise ModelError(
            f"{place} holds the weights of another model than [model] describes:{listed}\n"
            f'Change these keys, or take them from there: model.from = "{place}".'
        )
    return config


def read_config(folder: Path | str) -> dict[str, Any]:
    """Read the `config.json` of a folder.

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
    """Return the keys of `[model]` for the model in a folder, with all defaults filled in.

    Raises:
        ModelError: there is no `config.json`, or it cannot be read.
    """
    try:
        tree = plain(config_from_hf(read_config(folder)))
    except ModelError as error:
        raise ModelError(f"from = {str(folder)!r}: {error}") from None
    return {key: value for key, value in tree.items() if key != "type"}
