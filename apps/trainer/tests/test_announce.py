"""What a start says of a job before it begins."""

import pytest
from forge_config import ConfigError, plain
from forge_trainer.config.job import load_job
from forge_trainer.report.announce import unbalanced

SOFTMAX = "--model.ffn.router.type=softmax"


@pytest.mark.parametrize(
    ("file", "flags", "said"),
    [
        ("debug", [], False),
        ("moe_debug", [], False),
        ("moe_debug", [SOFTMAX], True),
        ("moe_debug", [SOFTMAX, "--model.ffn.router.batch_balance_weight=1e-2"], False),
        ("moe_debug", [SOFTMAX, "--model.ffn.router.sequence_balance_weight=1e-4"], False),
    ],
)
def test_softmax_routing_that_nothing_balances_is_said(file, flags, said):
    assert unbalanced(plain(load_job(f"configs/runs/{file}.toml", flags).value.model)) is said


def test_warm_up_that_is_longer_than_a_short_run_names_the_flag():
    with pytest.raises(ConfigError, match=r"schedule\.warmup_steps=1, or train longer"):
        load_job("configs/runs/debug.toml", ["--train.steps=12"])
    load_job("configs/runs/debug.toml", ["--train.steps=12", "--schedule.warmup_steps=1"])
