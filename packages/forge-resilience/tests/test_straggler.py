"""Slow ranks are named after three windows, at the phase that they are slow at, and nobody else is."""

import random

from forge_resilience.straggler import PROBE, Slow, Stragglers, scores


def medians(data=(0.01, 0.01), step=(1.0, 1.0), probe=(0.002, 0.002)):
    return [
        dict(zip(("data", "step", PROBE), each, strict=True)) for each in zip(data, step, probe, strict=True)
    ]


def test_scores_are_the_time_of_the_fastest_over_ones_own():
    found = scores(medians(data=(0.1, 0.4), probe=(0.003, 0.002)))
    assert found["data"] == [1.0, 0.25] and "step" not in found
    assert found[PROBE][0] == 2 / 3 and found[PROBE][1] == 1.0


def test_what_makes_no_difference_to_a_step_is_not_slow():
    assert scores(medians(data=(1e-5, 1e-2)))["data"] == [1.0, 1.0]


def test_slow_rank_is_named_once_in_its_third_window_in_a_row():
    stragglers = Stragglers()
    slow, fast = scores(medians(data=(0.1, 0.4))), scores(medians())
    named = [stragglers.window(found) for found in (slow, slow, fast, slow, slow, slow, slow)]
    assert named == [[], [], [], [], [], [Slow(1, "data", 0.25)], []]


def test_nobody_is_named_in_ten_thousand_clean_steps():
    chance, stragglers = random.Random(0), Stragglers()
    for _ in range(100):  # windows of a hundred steps, medians off by up to 10 %
        one = [[value * chance.uniform(0.95, 1.05) for _ in range(8)] for value in (0.1, 1.0, 0.002)]
        assert not stragglers.window(scores(medians(*one)))
