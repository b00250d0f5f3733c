"""How a plain value becomes JSON and comes back unchanged."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from forge_ckpt.error import CheckpointError

EXACT = 2**53
"""Integers up to here are numbers in everybody's JSON."""

SMALL = 64
"""Elements of a tensor that counts as a value."""


def to_json(value: object, where: str) -> Any:
    """Encode numbers, text, None, small tensors, and lists, tuples and dictionaries of them, as JSON.

    Args:
        value: the value.
        where: its name in the error.

    Raises:
        CheckpointError: it is something else.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) is int:
        return value if abs(value) < EXACT else {"int": str(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, list):
        return [to_json(item, where) for item in value]
    if type(value) is tuple:
        return {"tuple": [to_json(item, where) for item in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: to_json(item, where) for key, item in value.items()}}
    if isinstance(value, Tensor) and value.numel() <= SMALL:
        return {"tensor": to_json(value.tolist(), where), "dtype": str(value.dtype).removeprefix("torch.")}
    raise CheckpointError(
        f"{where} is {value!r:.200}; expected numbers, text, None, tensors of up to {SMALL} elements, or "
        "lists, tuples and dictionaries (by text) of them: keep anything else elsewhere"
    )


def from_json(value: Any) -> Any:
    """Inverse of `to_json`; tensors are on the CPU.

    Raises:
        CheckpointError: `to_json` did not write it.
    """
    try:
        return _from_json(value)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{value!r:.80} is no value that we write: {error}") from None


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.tensor(_from_json(value["tensor"]), dtype=getattr(torch, value["dtype"]))
    if "tuple" in value:
        return tuple(_from_json(item) for item in value["tuple"])
    if "dict" in value:
        return {key: _from_json(item) for key, item in value["dict"].items()}
    return int(value["int"]) if "int" in value else float(value["float"])
