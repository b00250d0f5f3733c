"""A process that is killed at any instant of an extraction, and called again, ends with the same bytes.

`FORGE_KILLS=20 pytest packages/forge-interp/tests/test_extract_kill.py` kills 20 times in each test.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from forge_interp.extraction.extract import extract_representations
from forks import Forks
from torch import Tensor, nn

KILLS = int(os.environ.get("FORGE_KILLS", "3"))
SITES = {"acts": "*", "one": "1"}
SMALL = {"samples": 15, "longest": 6, "width": 4}
LARGE = {"samples": 60, "longest": 300, "width": 128}


def make_dataset(samples: int, longest: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(longest, (samples,), generator=generator).tolist()
    return [torch.randint(1, 9, (length,), generator=generator) for length in lengths]


def run(out: Path, world_size: int, size: dict[str, int], ranks: Iterable[int] | None = None) -> None:
    torch.manual_seed(0)
    width = size["width"]
    model = nn.Sequential(nn.Embedding(9, width), nn.Linear(width, width), nn.Tanh()).bfloat16()
    dataset = make_dataset(size["samples"], size["longest"])
    options: dict[str, Any] = {"batch_size": 3, "progress": False}
    for rank in range(world_size) if ranks is None else ranks:
        extract_representations(
            model, dataset, SITES[out.name], out, rank=rank, world_size=world_size, **options
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


def killed_run(at: int, *arguments: Any) -> None:
    counting(partial(run, *arguments), at)


def killed_after(forks: Forks, delay_s: float, *arguments: Any) -> int:
    """Start a run and send SIGKILL to it after some time; returns its exit code."""
    pid = forks.start(run, *arguments)
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    return forks.wait(pid)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", SITES)
def test_extract_ends_with_equal_bytes_when_killed_at_random_points(
    tmp_path: Path, forks: Forks, name: str, world_size: int
):
    (tmp_path / "whole").mkdir()
    total = counting(partial(run, tmp_path / "whole" / name, world_size, SMALL), None)
    whole = files(tmp_path / "whole")
    random, killed = Random(f"{name} {world_size}"), 0
    for trial in range(KILLS):
        folder = tmp_path / str(trial)
        folder.mkdir()
        arguments = (folder / name, world_size, SMALL)
        points = [random.randrange(1, total), random.randrange(1, total)]
        for at in points[: 1 + trial % 2]:  # every other one is killed again when it goes on
            code = forks.run(killed_run, at, *arguments)
            assert code in (0, -signal.SIGKILL)
            killed += code == -signal.SIGKILL
        assert forks.run(run, *arguments) == 0
        assert files(folder) == whole, (trial, points)
    assert killed >= KILLS


@pytest.mark.parametrize("name", SITES)
def test_extract_ends_with_equal_bytes_when_killed_at_random_times(tmp_path: Path, forks: Forks, name: str):
    (tmp_path / "whole").mkdir()
    assert forks.run(make_dataset, 1, 2) == 0  # what starts first also imports this file
    began = time.monotonic()
    assert forks.run(run, tmp_path / "whole" / name, 1, LARGE) == 0
    whole_s = time.monotonic() - began
    whole, random, killed, left = files(tmp_path / "whole"), Random(name), 0, set()
    for trial in range(4 * KILLS):
        if killed == KILLS:
            break
        folder = tmp_path / str(trial)
        folder.mkdir()
        code = killed_after(forks, random.uniform(0, whole_s), folder / name, 1, LARGE)
        killed += code == -signal.SIGKILL
        if code == 0:  # the machine is faster than it was: the run had ended
            whole_s /= 2
        left |= {path.name for path in folder.rglob("*")}
        assert forks.run(run, folder / name, 1, LARGE) == 0
        assert files(folder) == whole, trial
    assert killed == KILLS
    assert KILLS < 10 or any(name.endswith(".tmp") for name in left)


def test_extract_ends_with_equal_bytes_when_processes_end_at_once(tmp_path: Path, forks: Forks):
    (tmp_path / "whole").mkdir()
    run(tmp_path / "whole" / "acts", 1, SMALL)
    for trial in range(4):
        (tmp_path / str(trial)).mkdir()
        out = tmp_path / str(trial) / "acts"
        pids = [forks.start(run, out, 4, SMALL, [rank]) for rank in range(4)]
        assert [forks.wait(pid) for pid in pids] == [0] * 4
        assert files(tmp_path / str(trial)) == files(tmp_path / "whole")


def test_extract_ends_with_equal_bytes_when_two_processes_do_the_same(tmp_path: Path, forks: Forks):
    (tmp_path / "whole").mkdir()
    run(tmp_path / "whole" / "acts", 1, LARGE)
    (tmp_path / "both").mkdir()
    pids = [forks.start(run, tmp_path / "both" / "acts", 1, LARGE) for _ in range(3)]
    assert [forks.wait(pid) for pid in pids] == [0] * 3
    assert files(tmp_path / "both") == files(tmp_path / "whole")
