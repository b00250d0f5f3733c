"""Schedules as functions of the step: against torch's, against the formulas of their sources."""

import math

import pytest
import torch
from forge_config import ConfigError
from forge_trainer.cli import main
from forge_trainer.config.job import load_job
from forge_trainer.schedule import (
    ConstantConfig,
    CosineConfig,
    InverseSqrtConfig,
    LinearConfig,
    NoneConfig,
    RexConfig,
    WSDConfig,
    schedules,
)
from forge_trainer.schedule.draw import draw

STEPS = 40
EACH = [
    ConstantConfig(warmup_steps=5),
    CosineConfig(warmup_steps=5),
    LinearConfig(warmup_fraction=0.11),
    InverseSqrtConfig(warmup_tokens=95),
    NoneConfig(),
    RexConfig(warmup_steps=5),
    *(WSDConfig(warmup_steps=5, decay_steps=10, shape=shape) for shape in ("cosine", "linear", "1-sqrt")),
]


def curve(schedule, steps=STEPS, step_tokens=20):
    return [schedule.factor(step, steps, step_tokens) for step in range(steps)]


def torchs(make, steps=STEPS):
    """The factors of a schedule of torch."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, found = make(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_every_schedule_is_tested():
    assert {type(schedule) for schedule in EACH} == {schedules[name] for name in schedules}


@pytest.mark.parametrize("schedule", EACH, ids=lambda s: f"{type(s).__name__}-{getattr(s, 'shape', '')}")
def test_schedule_warms_up_to_the_peak_and_never_rises_again(schedule):
    factors, warmup = curve(schedule), schedule.warmup(STEPS, 20)
    assert warmup == (0 if isinstance(schedule, NoneConfig) else 5)
    assert factors[:warmup] == pytest.approx([(i + 1) / 6 for i in range(warmup)])
    assert factors[warmup] == 1.0
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert all(0 < factor <= 1 for factor in factors)


def test_cosine_and_linear_equal_those_of_torch():
    optim = torch.optim.lr_scheduler
    assert curve(CosineConfig(floor=0.1)) == pytest.approx(
        torchs(lambda o: optim.CosineAnnealingLR(o, STEPS, eta_min=0.1))
    )
    assert curve(LinearConfig(floor=0.2)) == pytest.approx(
        torchs(lambda o: optim.LinearLR(o, start_factor=1.0, end_factor=0.2, total_iters=STEPS))
    )


@pytest.mark.parametrize(
    ("shape", "formula"),
    [
        ("linear", lambda p: 1 - p),
        ("1-sqrt", lambda p: 1 - p**0.5),
        ("cosine", lambda p: (1 + math.cos(math.pi * p)) / 2),
    ],
)
def test_wsd_decays_in_its_last_steps_only(shape, formula):
    factors = curve(WSDConfig(decay_fraction=0.25, shape=shape, floor=0.2))
    assert factors[:31] == [1.0] * 31
    assert factors[30:] == pytest.approx([0.2 + 0.8 * formula(i / 10) for i in range(10)])


def test_ends_of_schedules_are_one_step_before_the_floor():
    cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * (STEPS - 1) / STEPS)) / 2
    assert curve(CosineConfig(floor=0.1))[-1] == pytest.approx(cosine)
    assert curve(LinearConfig(floor=0.1))[-1] == pytest.approx(1 - 0.9 * (STEPS - 1) / STEPS)
    decayed = curve(WSDConfig(floor=0.1, decay_steps=8))
    assert decayed[-9:-7] == [1.0, 1.0] and decayed[-1] == pytest.approx(0.1 + 0.9 * (1 - (7 / 8) ** 0.5))
    with pytest.raises(ValueError, match="decay_steps = 1 would be the peak once more"):
        WSDConfig(decay_steps=1)


def test_fractions_of_a_run_are_those_that_were_written():
    assert [LinearConfig(warmup_fraction=part).warmup(100, 1) for part in (0.07, 0.29, 0.57)] == [7, 29, 57]
    assert curve(WSDConfig(decay_fraction=0.07, shape="linear"), 100)[92:94] == [1.0, 1.0]
    assert curve(WSDConfig(decay_fraction=0.07, shape="linear"), 100)[94] < 1


def test_wsd_without_decay_does_not_depend_on_the_length_of_the_run():
    long = curve(WSDConfig(warmup_steps=3, decay_steps=0), 80)
    assert (
        curve(WSDConfig(warmup_steps=3, decay_steps=10))[:30]
        == long[:30]
        == [1 / 4, 2 / 4, 3 / 4] + [1.0] * 27
    )


def test_wsd_decay_begins_after_the_warmup_at_the_earliest():
    assert curve(WSDConfig(warmup_steps=30, decay_steps=40, shape="linear"))[30:] == pytest.approx(
        [1 - i / 10 for i in range(10)]
    )


def test_rex_and_inverse_sqrt_are_the_formulas_of_their_sources():
    assert curve(RexConfig()) == pytest.approx(
        [(1 - t / STEPS) / (0.5 + 0.5 * (1 - t / STEPS)) for t in range(STEPS)]
    )
    assert curve(InverseSqrtConfig(warmup_steps=4))[4:] == pytest.approx(
        [2 / t**0.5 for t in range(4, STEPS)]
    )
    assert InverseSqrtConfig(timescale_steps=9).factor(7, STEPS) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--schedule.warmup_fraction=0.5"], "warmup_steps = 20 and warmup_fraction = 0.5 say the same"),
        (["--schedule.type=inverse-sqrt"], "neither a warm-up nor timescale_steps"),
        (["--schedule.type=none", "--schedule.warmup_steps=1"], 'use type = "constant"'),
        (["--schedule.type=linear", "--schedule.warmup_tokens=1e9"], "warmup_tokens"),
        (["--schedule.type=linear", "--schedule.warmup_tokens=1_000_000_000"], "is not below train.steps"),
        (["--schedule.type=wsd", "--schedule.shape=sqrt"], "1-sqrt"),
        (["--schedule.type=cosin"], "cosine"),
    ],
)
def test_bad_schedule_is_refused(flags, error):
    with pytest.raises(ConfigError, match=error):
        load_job("configs/runs/debug.toml", flags)


def test_curve_is_drawn_in_columns_of_its_heights():
    lines = list(draw(lambda step: step / 7, 8, height=2))
    assert lines == ["  1.00 |     ▃▆█"[:8] + "    ▁▃▆█", "       |" + " ▂▅▇████", "       0      7"]


def test_plan_draws_the_schedule(capsys):
    assert main(["plan", "configs/runs/debug.toml", "--schedule.type=wsd"]) == 0
    said = capsys.readouterr().out
    assert "  wsd schedule" in said and said.count("█") > 100 and said.rstrip().endswith("399")
