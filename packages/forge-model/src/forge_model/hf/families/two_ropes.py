"""Rotary embeddings of models in which full-attention layers have one and sliding-window layers another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forge_model.attention.rope_config import RopeConfig
from forge_model.decoder.config import DecoderConfig
from forge_model.hf.families.dense import FULL, SLIDING, Full
from forge_model.hf.rope import rope_from_hf, rope_problems, rope_to_hf


def two_ropes(full: Full, local_theta: float) -> tuple[RopeConfig, RopeConfig]:
    """Return the ropes of full-attention and window layers; `local_theta` is the default of the latter."""
    return rope_from_hf(_keys(full, FULL, local_theta)), rope_from_hf(_keys(full, SLIDING, local_theta))


def _keys(full: Full, kind: str, local_theta: float) -> dict[str, Any]:
    """Return the rotary keys of one kind of layer, as the classes of `transformers` find them."""
    table = dict((full.get("rope_parameters") or {}).get(kind) or {})
    if kind == FULL:
        table |= full.get("rope_scaling") or {}
    theta = full.get("rope_theta") if kind == FULL else local_theta
    keys = {"rope_parameters": {"rope_theta": theta} | table}
    return keys | {"max_position_embeddings": full["max_position_embeddings"]}


def two_rope_problems(full: Full, local_theta: float) -> Iterator[str]:
    """Yield the problems with rotary keys that have no counterpart here."""
    parameters = full.get("rope_parameters") or {}
    nested = isinstance(parameters, Mapping) and all(
        isinstance(one, Mapping | None) for one in parameters.values()
    )
    if not nested or set(parameters) - {FULL, SLIDING}:
        yield f"rope_parameters = {parameters!r}, expected a table for each of {FULL} and {SLIDING}"
    elif not isinstance(full.get("rope_scaling") or {}, Mapping):
        yield f"rope_scaling = {full['rope_scaling']!r}, expected a table"
    else:
        for kind in (FULL, SLIDING):
            yield from rope_problems(_keys(full, kind, local_theta))


def two_ropes_to_hf(config: DecoderConfig, found: dict[str, Any]) -> dict[str, Any]:
    """Add the rotary keys of each kind of layer to the keys of a `config.json`."""
    kinds = dict(zip(found["layer_types"], map(config.layer, range(config.num_layers)), strict=True))
    found = {name: value for name, value in found.items() if name != "rope_theta"}
    return found | {"rope_parameters": {kind: rope_to_hf(layer.rope) for kind, layer in kinds.items()}}
