from pathlib import Path

import pytest
from forge_config import ConfigError
from forge_parallel.error import ParallelError
from forge_trainer.config.job import load_job

DEBUG = Path(__file__).parents[3] / "configs" / "runs" / "debug.toml"
NO_BATCH = "--train.global_batch=0"


def test_global_batch_may_be_said_in_tokens():
    tokens = ["--data.max_tokens=128", "--train.global_batch_tokens=4096", "--train.micro_batch=8"]
    job = load_job(DEBUG, [NO_BATCH, *tokens]).value
    assert job.train.global_batch == 32 and job.step_tokens == 4096
    assert load_job(DEBUG, ["--train.global_batch=32", *tokens]).value == job


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([NO_BATCH], "global_batch is missing"),
        ([NO_BATCH, "--train.global_batch_tokens=1000"], "no whole number of sequences.*use 768 or 1024"),
        (["--train.global_batch=16", "--train.global_batch_tokens=2048"], "global_batch = 16.*use 2048 or"),
        (["--train.global_batch=12", "--train.micro_batch=8"], "12 is no multiple of train.micro_batch = 8"),
    ],
)
def test_portions_that_do_not_fit_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_job(DEBUG, ["--data.max_tokens=256", *overrides])


def test_ranks_that_cannot_cut_the_batch_hear_what_can():
    job = load_job(DEBUG, ["--train.global_batch=24", "--train.micro_batch=4"]).value
    expected = r"use train.global_batch = 20 or 40, or 3 ranks that read"
    with pytest.raises(ParallelError, match=expected):
        job.require_layout(5)
    with pytest.raises(
        ParallelError, match=r"use train.global_batch = 32, or train.micro_batch = 3, or 6 ranks"
    ):
        job.require_layout(8)


def test_run_that_ends_with_its_data_has_no_phase_at_a_part_of_its_length(tmp_path):
    (tmp_path / "r.toml").write_text(
        f'extends = "{DEBUG}"\n[data]\nwhen_exhausted = "stop"\n[[data.sources]]\ntype = "python-stdlib"\n'
        'name = "a"\n[[data.phases]]\nstart_fraction = 0.5\nweights = { a = 1.0 }\n'
    )
    with pytest.raises(ConfigError, match="use start_step or start_tokens"):
        load_job(tmp_path / "r.toml")
