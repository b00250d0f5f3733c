"""Differences between two decoders because of which weights of one do not fit the other. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_config import Config, plain
from forge_config.registry import type_name

from forge_model.decoder.config import DecoderConfig, LayerConfig

NOT_COMPARED = {
    "preset": "fills in other keys",
    "from": "fills in other keys",
    "max_tokens": "no weight depends on it, unless positions are learned",
    "init_std": "how weights start",
    "overrides": "in the parts of each layer",
    "mtp.loss_weight": "how it learns",
    "ffn.router.z_loss_weight": "how it learns",
    "ffn.router.batch_balance_weight": "how it learns",
    "ffn.router.balance_scope": "how it learns",
    "ffn.router.sequence_balance_weight": "how it learns",
    "ffn.router.bias_rate": "how it learns",
    "ffn.router.bias_schedule": "how it learns",
    "ffn.router.bias_schedule_steps": "how it learns",
    "ffn.scale_gradients": "how it learns",
}
"""Keys by which two models may differ and still compute the same with the same weights, and why. Every other
key counts, also keys of structs from outside this package."""


def differences(config: DecoderConfig, other: DecoderConfig) -> list[str]:
    """Return the keys by which two models have other weights or compute something else from equal weights.

    The keys of `NOT_COMPARED` do not count. A default equals the value that it is resolved to.

    Returns:
        One line per key, `key: value of config, there value of other (layers)`; empty if the models agree.
    """
    lines = _unlike(_outer(config), _outer(other))
    if config.learned_positions and config.max_tokens != other.max_tokens:
        lines.append(f"max_tokens: {config.max_tokens}, there {other.max_tokens}")
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


def _outer(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of a model outside of its layers, flat; `norm` is that of the last hidden state."""
    tree = {"type": _type(config), **plain(config), "logit_divisor": config.divisor}
    of_layers = {name for name in LayerConfig.__struct_fields__ if name not in ("norm", "norm_order")}
    of_layers.add("scaling")  # about learning; its effect on results is in the divisor and attention scale
    return _compared({key: value for key, value in tree.items() if key not in of_layers})


def _resolved(config: DecoderConfig, index: int) -> dict[str, Any]:
    """Return the parts of a layer, flat, with their defaults resolved."""
    layer = config.layer(index)
    parts = {name: getattr(layer, name) for name in type(layer).__struct_fields__ if name != "norm_order"}
    parts["attention"] = layer.attention.resolved(config.dim)
    parts["ffn"] = layer.ffn.resolved(config.dim)
    return _compared({part: {"type": _type(one), **plain(one)} for part, one in parts.items()})


def _type(struct: Config) -> str:
    """Return the type of a struct, since two types with equal keys may compute different things."""
    return type_name(type(struct)) or type(struct).__name__


def _compared(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in _flat(tree).items() if key not in NOT_COMPARED}


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested tables into one, with keys joined by dots."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        below = _flat(value) if isinstance(value, Mapping) else {}
        found |= {f"{key}.{inner}": one for inner, one in below.items()} or {key: value}
    return found


def _unlike(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}: {ours.get(key, 'absent')!r}, there {theirs.get(key, 'absent')!r}"
        for key in [*ours, *(key for key in theirs if key not in ours)]
        if ours.get(key, "absent") != theirs.get(key, "absent")
    ]
