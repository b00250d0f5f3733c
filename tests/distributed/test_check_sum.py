"""Sums over ranks are checked against what they must be, and a rank that gets another one is named."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forge_parallel.config import MeshConfig
from forge_parallel.env import Env
from forge_parallel.mesh import build_mesh
from forge_parallel.testing import run_ranks
from forge_trainer.hooks.collectives import CheckCollectives, groups_of

pytestmark = pytest.mark.dist


class Notes:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[dict] = []

    def log(self, record: dict) -> None:
        self.records.append(record)


def flip(rank: int) -> None:
    """From now on one number of every sum is wrong on a rank."""
    whole = dist.all_reduce

    def damaged(tensor: torch.Tensor, *args: object, **kwargs: object) -> None:
        whole(tensor, *args, **kwargs)
        if dist.get_rank() == rank and tensor.is_floating_point():
            tensor[17] += 1

    dist.all_reduce = damaged


def check(folder: Path, mesh: dict[str, int], bad: int | None) -> tuple[list[str], list[dict]]:
    """Check once at the start and once after a step; the names of groups, and what was logged."""
    env = Env.detect()
    grid = build_mesh(MeshConfig(**mesh), env)
    notes, progress = Notes(), SimpleNamespace(step=3, tokens=9)
    run = SimpleNamespace(mesh=grid, env=env, trackers=[notes], directory=folder, progress=progress)
    hook, whole = CheckCollectives(1, run), dist.all_reduce
    try:
        hook.on_start(progress)
        if bad is not None:
            flip(bad)
        hook.on_step(progress, None)
    finally:
        dist.all_reduce = whole
    return list(groups_of(grid)), notes.records


@pytest.mark.parametrize(
    ("mesh", "names"), [({}, ["stage"]), ({"tp": 2, "pp": 2}, ["stage", "pipeline"])], ids=["dp", "tp-pp"]
)
def test_right_sums_are_timed_and_nobody_is_named(tmp_path, mesh, names):
    for named, records in run_ranks(check, 4, tmp_path, mesh, None):
        assert named == names and len(records) == 1
        assert all(0 < records[0][f"collectives/{name}_s"] < 60 for name in names)
    assert not list(tmp_path.iterdir())


def test_rank_with_a_wrong_sum_is_named_with_its_host(tmp_path):
    run_ranks(check, 2, tmp_path, {}, 1)
    (line,) = (tmp_path / "incidents.jsonl").read_text().splitlines()
    told = json.loads(line)
    assert told["kind"] == "hardware" and told["step"] == 3
    assert told["why"].startswith("rank 1 on ") and "gets 3 wrong numbers" in told["why"]
