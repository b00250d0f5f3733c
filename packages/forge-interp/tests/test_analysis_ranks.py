"""Moments summed over two real gloo ranks equal one process."""

from pathlib import Path

import numpy as np
import pytest
import torch
from forge_interp.analysis.accumulate import Moments
from forge_interp.analysis.similarity import linear_cka, mean_cca
from forks import Forks
from torch import distributed

pytestmark = pytest.mark.dist

WIDTHS = {"x": 5, "y": 3}
CUTS = {"uneven": 30, "one rank has none": 120}
BATCH = 15


def make_rows(cut: slice) -> dict[str, torch.Tensor]:
    """Rows of two layers whose means are far from 0 and differ between the ranks."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(120, 5, generator=random, dtype=torch.float64) + torch.arange(120)[:, None]
    y = x[:, :3] @ torch.randn(3, 3, generator=random, dtype=torch.float64)
    y = y + torch.randn(120, 3, generator=random, dtype=torch.float64) - 1e4
    return {"x": x[cut], "y": y[cut]}


def accumulate(cut: slice) -> Moments:
    rows, moments = make_rows(cut), Moments(WIDTHS)
    for start in range(0, len(rows["x"]), BATCH):
        moments.update({name: x[start : start + BATCH] for name, x in rows.items()})
    return moments


def run_rank(rank: int, folder: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for case, cut in CUTS.items():
        moments = accumulate(slice(cut) if rank == 0 else slice(cut, None))
        torch.save(moments.all_reduce().state(), folder / f"{case}.{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    ranks = [forks.start(run_rank, rank, path) for rank in range(2)]
    assert [forks.wait(rank) for rank in ranks] == [0, 0]
    return path


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", list(CUTS))
def test_all_reduce_over_two_ranks_equals_one_process(folder, case, rank):
    whole = accumulate(slice(None))
    moments = Moments(WIDTHS).load_state(torch.load(folder / f"{case}.{rank}.pt"))
    assert moments.count == 120
    for measure in (linear_cka, mean_cca):
        np.testing.assert_allclose(measure(moments).values, measure(whole).values, atol=1e-10)
    torch.testing.assert_close(moments.mean("y"), whole.mean("y"), rtol=1e-14, atol=0)


def test_all_reduce_leaves_every_rank_with_the_same_numbers(folder):
    for case in CUTS:
        here, there = (torch.load(folder / f"{case}.{rank}.pt") for rank in range(2))
        assert all(torch.equal(here[name], there[name]) for name in here)
