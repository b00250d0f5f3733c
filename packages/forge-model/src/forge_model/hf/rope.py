"""Conversion between `[model.rope]` and the rotary keys of a Hugging Face `config.json`. Imports no torch.

Source: `modeling_rope_utils.py` of `transformers` 5.23 (which keys are read, and their defaults).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite, log
from typing import Any

import msgspec

from forge_model.attention.rope_config import (
    LinearRopeConfig,
    Llama3RopeConfig,
    LongRopeConfig,
    RopeConfig,
    YarnRopeConfig,
)

ORIGINAL = "original_max_position_embeddings"
ROPE_KEYS = frozenset({"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", ORIGINAL})
"""The keys of a `config.json` that are read here."""

EVERY_KIND = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
NEEDED: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor"},
    "longrope": {"short_factor", "long_factor"},
}
SHARED_KINDS = ("default", "linear", "llama3", "yarn")
"""The kinds of rotary embedding that every family may have."""

STRUCTS: dict[str, type[RopeConfig]] = {
    "default": RopeConfig,
    "linear": LinearRopeConfig,
    "llama3": Llama3RopeConfig,
    "yarn": YarnRopeConfig,
    "longrope": LongRopeConfig,
}
OPTIONAL: dict[str, set[str]] = {
    "llama3": {ORIGINAL},
    "yarn": {ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {ORIGINAL, "attention_factor", "factor"},
}
LISTS = ("short_factor", "long_factor")
"""The keys whose value is a list with a number for each pair."""


def _parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters, including old keys beside the table."""
    found = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    found.setdefault("rope_theta", hf.get("rope_theta") or 10000.0)
    found.setdefault("partial_rotary_factor", hf.get("partial_rotary_factor"))
    return found


def _kind(parameters: Mapping[str, Any]) -> Any:
    return parameters.get("rope_type", parameters.get("type", "default"))


def rotary_dim(hf: Mapping[str, Any], width: int) -> int | None:
    """Return the width of the rotated part of a head; None if all of its `width` is rotated.

    Raises:
        ValueError: the part is empty, or its width is odd.
    """
    factor = _parameters(hf)["partial_rotary_factor"]
    part = width if factor is None else int(width * factor)
    if part != width and (part < 2 or part % 2):
        raise ValueError(
            f"partial_rotary_factor = {factor} of heads that are {width} wide (head_dim, or hidden_size / "
            f"num_attention_heads) rotates {part} dims; expected an even number above 0"
        )
    return None if part == width else part


def rope_problems(
    hf: Mapping[str, Any],
    partial: bool = False,
    kinds: tuple[str, ...] = SHARED_KINDS,
) -> Iterator[str]:
    """Yield the problems with rotary keys that have no counterpart here.

    Args:
        hf: the `config.json`.
        partial: whether a part of each head may be rotated.
        kinds: kinds of rotary embedding that are supported for the family.
    """
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(hf.get(name) or {}, dict):
            yield f"{name} = {hf[name]!r}, expected a table"
            return
    parameters = _parameters(hf)
    kind = _kind(parameters)
    if kind not in kinds:
        yield f"rope_type = {kind!r}, only {', '.join(kinds)} can be read of this family"
        return
    part = parameters["partial_rotary_factor"]
    if partial and _is_number(part) and not 0 < (1 if part is None else part) <= 1:
        yield f"partial_rotary_factor = {part!r}, expected a number above 0, at most 1"
    elif not partial and part not in (None, 1):
        yield f"partial_rotary_factor = {parameters['partial_rotary_factor']!r}, only 1 can be read"
    missing = sorted(NEEDED[kind] - parameters.keys())
    if missing:
        yield f"a {kind} rope without {', '.join(missing)}"
    known = EVERY_KIND | NEEDED[kind] | OPTIONAL.get(kind, set())
    for name, value in parameters.items():
        if name not in known and value is not None:
            yield f"{name} = {value!r} is not known of a {kind} rope"
        elif name in known and (expected := _mismatch(name, value)):
            yield f"{name} = {value!r} of the rope, expected {expected}"


def _mismatch(name: str, value: Any) -> str:
    """Return what a key of the rope is expected to be if its value is something else; otherwise ""."""
    if name in LISTS:
        fits = isinstance(value, list) and value and all(_is_number(one) for one in value)
        return "" if fits else "a list of numbers"
    return "" if name in ("rope_type", "type", "truncate") or _is_number(value) else "a number"


def _is_number(value: Any) -> bool:
    return value is None or (
        isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    )


def rope_from_hf(hf: Mapping[str, Any]) -> RopeConfig:
    """Return the rotary embedding of a `config.json` in which `rope_problems` finds nothing.

    Raises:
        ValueError: a number is outside of its bounds.
    """
    parameters = _parameters(hf)
    kind = _kind(parameters)
    values = {"theta": parameters["rope_theta"]}
    values |= {f"{name}s" if name in LISTS else name: parameters[name] for name in NEEDED[kind]}
    longest = hf["max_position_embeddings"]
    original = hf.get(ORIGINAL) or parameters.get(ORIGINAL) or longest
    if kind == "llama3":
        values["original_max_tokens"] = original
    if kind == "yarn":
        values["factor"] = factor = (
            longest / original if parameters["factor"] is None else parameters["factor"]
        )
        values |= {
            "beta_fast": parameters.get("beta_fast") or 32.0,
            "beta_slow": parameters.get("beta_slow") or 1.0,
            "original_max_tokens": original,
            "truncate": parameters.get("truncate", True),
            "scale": _yarn_scale(parameters, factor),
        }
    if kind == "longrope":
        factor, scale = parameters.get("factor"), parameters.get("attention_factor")
        factor = max(1.0, longest / original if factor is None else factor)
        values |= {"factor": factor, "original_max_tokens": original, "scale": scale}
    try:
        return msgspec.convert(values, STRUCTS[kind])
    except msgspec.ValidationError as error:
        named = (
            str(error).replace("$.theta", "$.rope_theta").replace("$.original_max_tokens", f"$.{ORIGINAL}")
        )
        raise ValueError(f"the {kind} rope: {named}") from None


def _yarn_scale(parameters: Mapping[str, Any], factor: float) -> float | None:
    """Return the factor on cosines and sines; None if it is the published function of `factor`."""
    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]
    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if not (above and below):
        return None
    return 1.0 if factor <= 1 else (0.1 * above * log(factor) + 1) / (0.1 * below * log(factor) + 1)


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """Return the table `rope_parameters`."""
    given: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": "default"}
    if isinstance(rope, LinearRopeConfig):
        return given | {"rope_type": "linear", "factor": rope.factor}
    if isinstance(rope, Llama3RopeConfig):
        return given | {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            ORIGINAL: rope.original_max_tokens,
        }
    if isinstance(rope, YarnRopeConfig):
        scale = {} if rope.scale is None else {"attention_factor": rope.scale}
        return given | {
            "rope_type": "yarn",
            "factor": rope.factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
            ORIGINAL: rope.original_max_tokens,
            **scale,
        }
    if isinstance(rope, LongRopeConfig):
        return given | {
            "rope_type": "longrope",
            "factor": rope.factor,
            "short_factor": list(rope.short_factors),
            "long_factor": list(rope.long_factors),
            ORIGINAL: rope.original_max_tokens,
            **({} if rope.scale is None else {"attention_factor": rope.scale}),
        }
    return given
