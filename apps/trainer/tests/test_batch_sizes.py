"""How a batch grows: sizes against a plain loop, and what is refused."""

import itertools
import random

import pytest
from forge_config import ConfigError
from forge_data.config import DataConfig
from forge_data.order.batch_sizes import BatchSizes
from forge_data.order.skips import SkipConfig
from forge_trainer.config.job import load_job
from msgspec.structs import replace

DEBUG = "configs/runs/debug.toml"


def sizes_of(*stages: tuple[int, int], last: int) -> tuple[BatchSizes, list[int]]:
    """The object, and the global batch of each of 200 steps."""
    plain = [batch for batch, steps in stages for _ in range(steps)]
    return BatchSizes([(steps, batch) for batch, steps in stages], last), plain + [last] * (200 - len(plain))


@pytest.mark.parametrize("seed", range(20))
def test_sizes_are_those_of_a_plain_loop(seed):
    rng = random.Random(seed)
    unit = rng.randrange(1, 5)
    batches = sorted(rng.sample(range(1, 20), rng.randrange(1, 5)))
    stages = [(unit * batch, rng.randrange(1, 20)) for batch in batches]
    sizes, plain = sizes_of(*stages[:-1], last=stages[-1][0])
    assert [sizes.at(step) for step in range(200)] == plain
    assert [sizes.samples(step) for step in range(201)] == [0, *itertools.accumulate(plain)]
    assert all(batch % sizes.unit == 0 for batch in plain)
    for items in range(0, sizes.items(200), 7):
        whole = sum(1 for end in itertools.accumulate(plain) if end <= items * sizes.unit)
        assert sizes.whole_steps(items) == whole


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5])
def test_steps_take_the_samples_of_one_stream_in_order(step):
    sizes, plain = sizes_of((2, 2), (6, 1), last=8)
    begin = sizes.samples(step)
    items = ([n, n + 1] for n in itertools.count(begin, 2))
    batches = sizes.of_steps(items, step)
    for length in plain[step : step + 6]:
        assert next(batches) == list(range(begin, begin + length))
        begin += length


def test_skips_of_steps_name_the_same_samples():
    sizes, _ = sizes_of((2, 3), last=8)
    data = load_job(DEBUG).value.data
    data = replace(data, skip=[SkipConfig(start_step=2, end_step=5), SkipConfig(samples=[3])])
    found = sizes.counted_in_items(data)
    assert isinstance(found, DataConfig)
    assert (found.skip[0].start_step, found.skip[0].end_step) == (2, (6 + 16) // 2)
    assert found.skip[1] == data.skip[1]


SHORT = "--train.batch_warmup=[{global_batch=4,steps=5}]"


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--train.batch_warmup=[{global_batch=64,steps=5}]"], "larger than the one before"),
        (["--train.batch_warmup=[{global_batch=3,steps=5}]", "--train.micro_batch=2"], "no multiple"),
        (["--train.batch_warmup=[{global_batch=4,steps=100000}]"], "lasts 100000 steps"),
        (["--train.batch_warmup=[{global_batch=0,steps=5}]"], "global_batch"),
        (
            [SHORT, "--schedule.warmup_steps=0", "--schedule.warmup_tokens=3000"],
            "schedule.warmup_tokens with train.batch_warmup",
        ),
        (
            [SHORT, '--data.phases=[{start_tokens=9000,weights={"0"=1.0}}]'],
            "data.phases with train.batch_warmup",
        ),
    ],
)
def test_bad_warmups_are_refused(flags, error):
    with pytest.raises(ConfigError, match=error):
        load_job(DEBUG, flags)
