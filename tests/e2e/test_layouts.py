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
EXPERTS = """
[model.ffn]
type = "moe"
num_experts = 8
top_k = 3
dim = 24
router = { type = "sigmoid", bias_rate = 0.02 }
"""
MTP = "\n[model.mtp]\nnum_modules = 1\n"
"""Appended to the run."""
EXPERT_LAYOUTS = {
    "one": (1, (), EXPERTS + MTP),
    "fsdp2": (2, (), EXPERTS + MTP),
    "ep2": (2, ("--mesh.ep=2",), EXPERTS + MTP),
    "pp2": (2, ("--mesh.pp=2",), EXPERTS),
}


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_run_killed_ten_times_ends_bit_identical_to_an_uninterrupted_one(forge, tiny, tmp_path, layout):
    ranks, flags = LAYOUTS[layout]
    check_kills(forge, tiny, tmp_path, ranks, flags)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_run_of_experts_killed_four_times_ends_bit_identical_to_an_uninterrupted_one(
    forge, tiny, tmp_path, layout
):
    ranks, flags, extra = EXPERT_LAYOUTS[layout]
    found = check_kills(forge, tiny, tmp_path, ranks, flags, extra, kills=4, steps=24)
    assert len({found[f"model.layers.{index}.ffn.router.selection_bias"] for index in range(2)}) == 2


def check_kills(forge, tiny, tmp_path, ranks, flags, extra="", kills=KILLS, steps=STEPS) -> dict[str, bytes]:
    """Kill a run again and again, compare it with another; returns what both have saved."""
    whole = tiny(steps=steps, name="whole.toml", root=tmp_path / "whole", extra=extra)
    forge("train", whole, *flags, ranks=ranks)
    cut, run, draw = tiny(steps=steps, extra=extra), tmp_path / "runs" / "tiny", random.Random(str(flags))
    ends = []
    for _ in range(kills):
        reached = max((r["step"] for r in lines(run)), default=0)
        ends.append(forge.stop_at(cut, reached + draw.randint(1, 4), signal.SIGKILL, ranks, *flags))
    assert ends == [-signal.SIGKILL] * kills and not complete(run), "each start was killed while it trained"
    forge("train", cut, *flags, ranks=ranks)
    saved = state(run)
    assert saved == state(tmp_path / "whole" / "tiny")
    assert losses(run) == losses(tmp_path / "whole" / "tiny")
    return saved


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


def complete(run) -> bool:
    return any("eval/loss" in record for record in lines(run))


def lines(run) -> list[dict]:
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
