"""A run under each layout, killed again and again, ends like one that was left alone."""

import json
import random
import signal

import pytest
from runs import losses, state

TP = ("--mesh.tp=2", "--model.attention.num_kv_heads=2")
LAYOUTS = {
    "tp2": (2, TP),
    "cp2": (2, ("--mesh.cp=2",)),
    "pp2": (2, ("--mesh.pp=2",)),
    "fsdp2-tp2": (4, TP),
    "fsdp2-cp2": (4, ("--mesh.cp=2",)),
    "pp2-fsdp2": (4, ("--mesh.pp=2",)),
}
KILLS, STEPS = 10, 60


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_run_killed_ten_times_ends_bit_identical_to_an_uninterrupted_one(forge, tiny, tmp_path, layout):
    ranks, flags = LAYOUTS[layout]
    whole = tiny(steps=STEPS, name="whole.toml", root=tmp_path / "whole")
    forge("train", whole, *flags, ranks=ranks)
    cut, run, draw = tiny(steps=STEPS), tmp_path / "runs" / "tiny", random.Random(layout)
    for _ in range(KILLS):
        reached = max((r["step"] for r in lines(run)), default=0)
        forge.stop_at(cut, reached + draw.randint(1, 4), signal.SIGKILL, ranks, *flags)
    forge("train", cut, *flags, ranks=ranks)
    assert state(run) == state(tmp_path / "whole" / "tiny")
    assert losses(run) == losses(tmp_path / "whole" / "tiny")


@pytest.mark.slow
@pytest.mark.dist
def test_run_goes_on_under_one_layout_after_another(forge, tiny, tmp_path):
    kv = "--model.attention.num_kv_heads=2"
    whole = tiny(steps=12, name="whole.toml", root=tmp_path / "whole")
    forge("train", whole, kv)
    cut = tiny(steps=12)
    for step, flags in ((2, ["--mesh.pp=2"]), (5, ["--mesh.tp=2"]), (8, ["--mesh.cp=2"])):
        forge.stop_at(cut, step, signal.SIGTERM, 2, kv, *flags)
    forge("train", cut, kv)
    assert losses(tmp_path / "runs" / "tiny") == pytest.approx(losses(tmp_path / "whole" / "tiny"), rel=1e-5)


def lines(run) -> list[dict]:
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
