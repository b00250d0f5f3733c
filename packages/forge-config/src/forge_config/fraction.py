"""How many steps are a part of a run? As the number is written, not as a float rounds it."""

from __future__ import annotations

from fractions import Fraction
from math import ceil


def part_of(fraction: float, whole: int) -> int:
    """`fraction` of `whole`, rounded up: 0.07 of 100 is 7, where the product of floats is a little above."""
    return ceil(Fraction(repr(fraction)) * whole)
