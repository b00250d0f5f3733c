"""Every run in configs/ is planned for ranks that it is meant for, without data, tokenizer or GPU."""

import math
from pathlib import Path

import pytest
from forge_trainer.config.job import load_job
from forge_trainer.plan.devices import load_table
from forge_trainer.plan.report import plan_of
from test_configs import RUNS

ROOT = Path(__file__).parents[2]
QUICK = {name for name in RUNS if "debug" in name} | {"llama-1b"}
TOO_LARGE = {"mla_moe_16b": "h200"}
"""Runs that need a device with more memory than an H100."""


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in RUNS])
def test_run_is_planned_and_fits(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ranks, parameters = RUNS[name]
    job = load_job(ROOT / "configs" / "runs" / f"{name}.toml", on_paper=True).value
    plan = plan_of(job, ranks, None, TOO_LARGE.get(name, "h100"), load_table())
    assert plan.parameters.total == pytest.approx(parameters, rel=0.03)
    assert plan.fits
    assert plan.time is not None and math.isfinite(plan.time.likely)
    assert 0 < plan.mfu() < 0.8
