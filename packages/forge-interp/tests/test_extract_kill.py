"""A process that is killed at any instant of an extraction, and called again, ends with the same bytes."""

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from forge_interp.extraction.extract import extract_representations
from torch import Tensor, nn

KILLS = 8
SITES = {"acts.npz": "*", "acts.safetensors": "*", "acts.zarr": "*", "acts": "*", "acts.npy": "1"}


def make_dataset() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 6, (15,), generator=generator).tolist()
    return [torch.randint(1, 9, (length,), generator=generator) for length in lengths]


def run(out: Path, world_size: int, ranks: Iterable[int] | None = None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Tanh()).bfloat16()
    options: dict[str, Any] = {"batch_size": 3, "progress": False}
    for rank in range(world_size) if ranks is None else ranks:
        extract_representations(
            model, make_dataset(), SITES[out.name], out, rank=rank, world_size=world_size, **options
        )


def counting(act: Callable[[], Any], at: int | None) -> int:
    """Run and count the calls and returns, of Python and C, in this package; SIGKILL at number `at`."""
    count = 0

    def step(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        if "forge_interp" in frame.f_code.co_filename:
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(step)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def start(act: Callable[[], Any]) -> int:
    """Start a forked process; returns its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def exit_code(pid: int) -> int:
    """Wait for a process; -9 when it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", SITES)
def test_extract_ends_with_equal_bytes_when_killed_at_random_points(
    tmp_path: Path, name: str, world_size: int
):
    (tmp_path / "whole").mkdir()
    total = counting(partial(run, tmp_path / "whole" / name, world_size), None)
    whole = files(tmp_path / "whole")
    random, killed = Random(f"{name} {world_size}"), 0
    for trial in range(KILLS):
        folder = tmp_path / str(trial)
        folder.mkdir()
        points = [random.randrange(1, total), random.randrange(1, total)]
        for at in points[: 1 + trial % 2]:  # every other one is killed again when it goes on
            act = partial(run, folder / name, world_size)
            code = exit_code(start(partial(counting, act, at)))
            assert code in (0, -signal.SIGKILL)
            killed += code == -signal.SIGKILL
        assert exit_code(start(partial(run, folder / name, world_size))) == 0
        assert files(folder) == whole, (trial, points)
    assert killed >= KILLS


def test_extract_ends_with_equal_bytes_when_processes_end_at_once(tmp_path: Path):
    (tmp_path / "whole").mkdir()
    run(tmp_path / "whole" / "acts", 1)
    for trial in range(4):
        (tmp_path / str(trial)).mkdir()
        out = tmp_path / str(trial) / "acts"
        pids = [start(partial(run, out, 4, [rank])) for rank in range(4)]
        assert [exit_code(pid) for pid in pids] == [0] * 4
        assert files(tmp_path / str(trial)) == files(tmp_path / "whole")
