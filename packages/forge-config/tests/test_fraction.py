"""Parts of a run, against rational arithmetic on what was written."""

from decimal import Decimal
from math import ceil

import pytest
from forge_config import part_of


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_parts_are_those_of_the_number_that_was_written(digits):
    for numerator in range(10**digits):
        text = f"0.{numerator:0{digits}}"
        for whole in (1, 3, 7, 10, 100, 399, 1000, 12_345):
            assert part_of(float(text), whole) == ceil(Decimal(text) * whole), (text, whole)


def test_small_and_whole_parts():
    assert [part_of(1e-05, 10**6), part_of(0.0, 9), part_of(1.0, 9), part_of(0.07, 100)] == [10, 0, 9, 7]
