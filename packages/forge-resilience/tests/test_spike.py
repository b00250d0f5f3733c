import json
import random

import numpy as np
import pytest
import torch
from forge_resilience.spike import SpikeCounter
from forge_resilience.verdict import Verdict


def curve(steps=400):
    """A loss that falls, with noise."""
    random.seed(7)
    return [3 + 4 * 0.99**step + random.gauss(0, 0.05) for step in range(steps)]


def guard(every=1, patience=3, window=32):
    return SpikeCounter(deviations=8, window=window, patience=patience, read_every_steps=every)


def judged(one, losses, first=0):
    """The step at which it first asks to stop, None if it never does."""
    for step, loss in enumerate(losses, first + 1):
        one.count(torch.tensor(loss, dtype=torch.float64), step)
        if one.verdict(step) is Verdict.ABORT:
            return step
    return None


def spikes_by_numpy(losses, window=32, deviations=8):
    """The definition, without any state but the list of what was accepted."""
    accepted, found = [], []
    for step, loss in enumerate(losses):
        last = np.array(accepted[-window:])
        if len(last) == window:
            middle = np.median(last)
            spread = 1.4826 * np.median(np.abs(last - middle))
            if loss > middle + deviations * max(spread, 1e-3 * abs(middle)):
                found.append(step)
                continue
        accepted.append(loss)
    return found


def test_falling_loss_has_no_spikes():
    one = guard()
    assert judged(one, curve()) is None and one.spikes() == 0


@pytest.mark.parametrize("every", [1, 7])
def test_row_of_spikes_is_trouble_and_its_steps_are_named(every):
    losses = curve()
    for step in (100, 200, 201, 202):
        losses[step] += 3
    one = guard(every)
    assert judged(one, losses) == -(-203 // every) * every
    assert one.trouble() == (200, 203)
    assert one.spikes() == len(spikes_by_numpy(losses[: -(-203 // every) * every])) == 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_loss_that_is_not_finite_is_no_spike_and_does_not_enter_the_range(bad):
    losses = curve()
    losses[100:160] = [bad] * 60
    one = guard()
    assert judged(one, losses) is None and one.spikes() == 0
    assert all(np.isfinite(one.state()["window"]))


def test_nothing_is_judged_before_the_window_is_full():
    assert judged(guard(), [*([1.0] * 31), *([100.0] * 3)]) is None
    assert judged(guard(), [*([1.0] * 32), *([100.0] * 3)]) == 35


def test_zero_deviations_look_for_nothing():
    one = SpikeCounter(0, 8, 1, 1)
    assert judged(one, [1.0] * 20 + [100.0] * 20) is None and not one.state()["window"]


@pytest.mark.parametrize("cut", [*range(1, 40, 6), *range(98, 106), 200, 201, 202])
def test_guard_decides_the_same_when_restarted_at_any_step(cut):
    losses = curve()
    for step in (100, 200, 201, 202):
        losses[step] += 3
    whole, first, second = guard(7), guard(7), guard(7)
    expected = judged(whole, losses)
    assert judged(first, losses[:cut]) is None
    second.load_state(json.loads(json.dumps(first.state())))
    assert judged(second, losses[cut:], cut) == expected
    assert second.state() == whole.state()
