"""Whether one value of TOML fits one shape, and the value in its Python type."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from msgspec import inspect as shapes

from forge_config.problem import nearest
from forge_config.shape import NUMBERS, Shape, is_path, shown, words


class Mismatch(ValueError):
    """A value of the wrong type or range; the text names it, what is expected, and a remedy."""


def scalar(given: Any, shape: Shape) -> Any:
    """The value of one scalar field.

    Integers stand for floats, never the other way round; true and false are no numbers.

    Raises:
        Mismatch: the value has another type or is out of bounds.
        TypeError: the annotation is none that a configuration can hold (our bug, or a plug's).
    """
    if isinstance(shape, shapes.AnyType):
        return given
    if isinstance(shape, shapes.LiteralType):
        return _literal(given, shape)
    if isinstance(shape, shapes.BoolType):
        fits = isinstance(given, bool)
    elif isinstance(shape, NUMBERS):
        return _number(given, shape)
    elif isinstance(shape, shapes.StrType):
        fits = isinstance(given, str) and _fits_text(given, shape)
    elif is_path(shape):
        fits = isinstance(given, str)
        given = Path(given) if fits else given
    else:
        raise TypeError(f"a field of a Config cannot be {shape!r}")
    if not fits:
        raise Mismatch(mismatch(given, shape))
    return given


def mismatch(given: Any, shape: Shape) -> str:
    """The sentence for a value that fits none of the alternatives of a shape."""
    hint = "; put it in quotes" if not isinstance(given, str) and words(shape).startswith("string") else ""
    if isinstance(given, str) and given.lower() in ("true", "false") and "true or false" in words(shape):
        hint = f"; write {given.lower()} without quotes"
    return f"given {shown(given)}; expected {words(shape)}{hint}"


def fits_length(size: int, shape: Any) -> bool:
    """Whether a string or an array has a length within the bounds of its shape."""
    low, high = shape.min_length, shape.max_length
    return (low is None or size >= low) and (high is None or size <= high)


def _literal(given: Any, shape: shapes.LiteralType) -> Any:
    for value in shape.values:
        if value == given and type(value) is type(given):
            return value
    choices = [value for value in shape.values if isinstance(value, str)]
    hint = nearest(given, choices) if isinstance(given, str) and choices else ""
    near = f"; {hint}" if hint.startswith("did") else ""
    raise Mismatch(mismatch(given, shape) + near)


def _number(given: Any, shape: shapes.IntType | shapes.FloatType) -> int | float:
    is_integer = isinstance(shape, shapes.IntType)
    if isinstance(given, bool) or not isinstance(given, int if is_integer else (int, float)):
        hint = "; only whole numbers, without point or exponent" if isinstance(given, float) else ""
        raise Mismatch(mismatch(given, shape) + hint)
    try:
        value = int(given) if is_integer else float(given)
    except OverflowError:
        raise Mismatch(mismatch(given, shape)) from None
    if not _within(value, shape):
        raise Mismatch(mismatch(given, shape))
    if math.isinf(value) and not _within(math.nan, shape):
        raise Mismatch(mismatch(given, shape) + "; what has bounds is finite")
    return value


def _within(value: float, shape: shapes.IntType | shapes.FloatType) -> bool:
    """NaN is within no bound."""
    return (
        (shape.gt is None or value > shape.gt)
        and (shape.ge is None or value >= shape.ge)
        and (shape.lt is None or value < shape.lt)
        and (shape.le is None or value <= shape.le)
        and (shape.multiple_of is None or math.remainder(value, shape.multiple_of) == 0)
    )


def _fits_text(given: str, shape: shapes.StrType) -> bool:
    return fits_length(len(given), shape) and (shape.pattern is None or _matches(shape.pattern, given))


def _matches(pattern: str, given: str) -> bool:
    """As JSON schema means it: `$` is the very end, not the place before a last line feed."""
    if pattern.endswith("$") and not pattern.endswith("\\$"):
        pattern = pattern[:-1] + r"\Z"
    return re.search(pattern, given) is not None
