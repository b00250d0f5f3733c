"""Every file in configs/ loads, alone or as part of a run."""

from pathlib import Path

import pytest
from forge_config import ConfigError
from forge_trainer.job import load_job

ROOT = Path(__file__).parents[2]
RUNS = sorted(ROOT.glob("configs/runs/*.toml"))
PARTS = sorted(path for kind in ("models", "data", "mesh") for path in ROOT.glob(f"configs/{kind}/*.toml"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_run_loads(path):
    assert load_job(path).value.job.name


@pytest.mark.parametrize("path", PARTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_part_loads_on_top_of_a_run(path, tmp_path):
    run = tmp_path / "run.toml"
    run.write_text(f'extends = ["{ROOT}/configs/runs/debug.toml", "{path}"]\n[model]\nmax_tokens = 131072\n')
    assert load_job(run).value


def test_seven_mistakes_are_reported_together_and_before_torch(tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text(
        f'extends = "{ROOT}/configs/runs/debug.toml"\n'
        "[model]\n"
        "nun_layers = 3\n"  # 1 unknown key
        'dim = "wide"\n'  # 2 wrong type
        "[train]\n"
        "steps = 0\n"  # 3 out of bounds
        "global_batch = 10\n"  # 4 no multiple of micro_batch = 4 (cross-key, other section valid)
        "[optimizer]\n"
        'type = "adamv"\n'  # 5 unknown component
        "[schedule]\n"
        "floor = 2.0\n"  # 6 out of bounds in an open section
        "[trane]\n"  # 7 unknown section
        "x = 1\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_job(bad)
    message = str(caught.value)
    for needle in (
        "nun_layers",
        "num_layers",
        "model.dim",
        "train.steps",
        "adamv",
        "adamw",
        "schedule.floor",
        "trane",
    ):
        assert needle in message, message
    assert message.count("bad.toml:") >= 6
