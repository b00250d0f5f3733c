"""Where two decoders differ, so that the weights of one do not fit the other. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_config import plain

from forge_model.decoder.config import DecoderConfig

SHARED_KEYS = (
    "vocab_size",
    "dim",
    "num_layers",
    "tie_embeddings",
    "norm_order",
    "embedding_scale",
    "logit_softcap",
)
"""Keys of a decoder that are no parts of its layers and change what it computes."""

TRAINING_KEYS = tuple(
    f"ffn.router.{key}"
    for key in ("z_loss_weight", "batch_balance_weight", "sequence_balance_weight", "bias_rate")
)
"""Keys of layers that change how they learn and not what they compute."""


def differences(config: DecoderConfig, other: DecoderConfig) -> list[str]:
    """Where two models compute something else with the same weights, or have other weights.

    `max_tokens`, `init_std` and what a default was resolved to do not count.

    Returns:
        One line a key, `key: value of config, there value of other (layers)`; empty if they agree.
    """
    lines = [
        f"{key}: {getattr(config, key)!r}, there {getattr(other, key)!r}"
        for key in SHARED_KEYS
        if getattr(config, key) != getattr(other, key)
    ]
    modules = [{"num_modules": one.mtp.num_modules} for one in (config, other)]
    lines += [f"mtp.{line}" for line in _unlike(*modules)]
    lines += [f"norm.{line}" for line in _unlike(plain(config.norm), plain(other.norm))]
    shared = min(config.num_layers, other.num_layers)
    where: dict[str, list[int]] = {}
    for index in range(shared):
        for line in _unlike(_resolved(config, index), _resolved(other, index)):
            where.setdefault(line, []).append(index)
    for line, layers in where.items():
        everywhere = len(layers) == shared
        if not (everywhere and line in lines):
            lines.append(line if everywhere else f"{line} (layers {', '.join(map(str, layers))})")
    return lines


def _resolved(config: DecoderConfig, index: int) -> dict[str, Any]:
    """The parts of a layer, flat, with their defaults resolved."""
    layer = config.layer(index)
    parts = {
        "attention": layer.attention.resolved(config.dim),
        "ffn": layer.ffn.resolved(config.dim),
        "norm": layer.norm,
        "rope": layer.rope,
    }
    flat = _flat({part: plain(one) for part, one in parts.items()})
    return {key: value for key, value in flat.items() if not key.startswith(TRAINING_KEYS)}


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables as one, keys joined by dots."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        below = _flat(value) if isinstance(value, Mapping) else {}
        found |= {f"{key}.{inner}": one for inner, one in below.items()} or {key: value}
    return found


def _unlike(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}: {ours.get(key, 'absent')!r}, there {theirs.get(key, 'absent')!r}"
        for key in [*ours, *(key for key in theirs if key not in ours)]
        if ours.get(key) != theirs.get(key)
    ]
