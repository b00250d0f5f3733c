import math

import numpy as np
import pytest
from forge_resilience.goodput import PRIOR_S, Line, add_up, line_of, save_every_s


def test_seconds_of_all_stretches_add_up_to_the_wall_time():
    lines = [
        Line(0, 100.0, 150.0, 0, 10, {"start": 20.0, "step": 25.0, "save": 2.0}),
        Line(0, 100.0, 200.0, 0, 30, {"start": 20.0, "step": 70.0, "save": 4.0}),
        Line(1, 230.0, 300.0, 20, 40, {"start": 30.0, "step": 38.0}, ended=True),
    ]
    found = add_up(lines)
    assert found.wall_s == 200.0 and sum(found.seconds.values()) == pytest.approx(200.0)
    # steps 20 to 30 of the first stretch took half of the 45 s between its two looks
    assert found.seconds["lost"] == 22.5
    assert found.seconds["productive"] == 70 - 22.5 + 38
    assert found.seconds["down"] == 30.0 and found.seconds["start"] == 50.0
    assert found.seconds["other"] == pytest.approx(6 + 2)
    assert (found.starts, found.failures) == (2, 1)
    assert found.ratio == pytest.approx((70 - 22.5 + 38) / 200)
    assert found.mean_time_to_failure_s == (170 + PRIOR_S) / 2


def test_ledger_without_lines_is_empty():
    found = add_up([])
    assert (found.ratio, found.wall_s, found.starts) == (0.0, 0.0, 0)
    assert line_of({"stretch": 1}) is None


@pytest.mark.parametrize(("stall_s", "mttf_s"), [(1.0, 3600.0), (30.0, 8 * 3600.0), (0.1, 600.0)])
def test_save_every_loses_nearly_the_least_time_of_a_simulation(stall_s, mttf_s):
    """Failures of a Poisson process; the expected time per useful second is known exactly (Daly eq. 13)."""

    def cost(every_s):
        return mttf_s * math.expm1((every_s + stall_s) / mttf_s) / every_s

    grid = np.geomspace(stall_s, 10 * mttf_s, 20_000)
    best = min(cost(every_s) for every_s in grid)
    assert cost(save_every_s(stall_s, mttf_s)) < best * 1.001


def test_save_that_takes_longer_than_the_time_between_failures():
    assert save_every_s(100.0, 10.0) == 10.0
