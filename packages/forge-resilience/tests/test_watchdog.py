import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forge_resilience.exit_codes import ExitCode
from forge_resilience.hang import REPORT, Report, name_the_one
from forge_resilience.heartbeat import Heartbeat, HeartbeatFile
from forge_resilience.watchdog import Watchdog

SCRIPT = Path(__file__).with_name("watched.py")


def started(folder: Path, how: str, ranks: int = 2) -> list[subprocess.Popen]:
    line = [sys.executable, str(SCRIPT), str(folder)]
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return [subprocess.Popen([*line, str(rank), str(ranks), how], **nowhere) for rank in range(ranks)]


def require_no_beats(folder: Path) -> None:
    """Monitors remove the files of ranks that were killed; they may take a moment."""
    paths = [Path(told.read_text()) for told in folder.glob("beat-*")]
    end = time.monotonic() + 10
    while paths and any(path.exists() for path in paths) and time.monotonic() < end:
        time.sleep(0.05)
    assert paths and not any(path.exists() for path in paths)


def ended(processes: list[subprocess.Popen]) -> list[int]:
    return [process.wait(timeout=40) for process in processes]


@pytest.mark.parametrize(
    ("how", "named", "codes"),
    [
        ("data", r"hang: rank 1 on \S+ (pid {1}) in 'data' for . s, while others wait in 'step'", [86, 86]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("gil", "hang: rank 1 on .* in 'step' for .*: no thread of it runs Python", [86, -9]),
                ("first", "hang: rank 1 on .* in 'never seen' .* others wait in 'step'", [86, 86]),
                ("all", "hang: all 2 ranks in 'step' after 4 steps", [86, 86]),
            ]
        ),
    ],
    ids=["data", "gil", "first", "all"],
)
def test_hang_ends_all_ranks_and_names_the_one(tmp_path, how, named, codes):
    folder, begin = tmp_path / "hang", time.monotonic()
    processes = started(folder, how)
    assert ended(processes) == codes
    assert time.monotonic() - begin < 15
    verdict = (folder / "verdict.txt").read_text()
    pattern = named.replace("(pid {1})", rf"\(pid {processes[1].pid}\)")
    assert re.match(pattern, verdict), verdict
    assert (tmp_path / "ended-0").read_text() == verdict.splitlines()[0]
    assert "wait_for_others" in (folder / "stacks-0.txt").read_text()
    if how == "gil":
        assert "watched.py" in (folder / "stacks-1.txt").read_text()
    assert (folder / "collectives-0.json").read_text() == "[]"
    require_no_beats(tmp_path)


@pytest.mark.slow
def test_stopped_process_is_named_and_killed(tmp_path):
    folder = tmp_path / "hang"
    processes = started(folder, "all")
    time.sleep(1.5)
    os.kill(processes[1].pid, signal.SIGSTOP)
    assert ended(processes) == [86, -9]
    assert f"(pid {processes[1].pid}) in 'step' for" in (folder / "verdict.txt").read_text().splitlines()[0]
    assert "the process is stopped" in (folder / "verdict.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["all", "early"])  # in the first phase of all, which may take ten minutes
def test_lone_process_that_is_stopped_at_once_is_killed(how, tmp_path):
    [process] = started(tmp_path / "hang", how, ranks=1)
    while not (tmp_path / "beat-0").exists():
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGSTOP)
    assert ended([process]) == [-9]
    assert "the process is stopped" in (tmp_path / "hang" / "verdict.txt").read_text()
    require_no_beats(tmp_path)


def test_run_that_goes_on_leaves_nothing(tmp_path):
    folder = tmp_path / "hang"
    folder.mkdir()
    (folder / "verdict.txt").write_text("of before")
    processes = started(folder, "none")
    assert ended(processes) == [0, 0]
    assert not folder.exists() and (tmp_path / "hang-before" / "verdict.txt").exists()
    require_no_beats(tmp_path)


def test_limits_are_learnt(tmp_path):
    dog = Watchdog(tmp_path / "hang", 0, 1, least_s=5, first_s=60)
    with dog:
        limits = []
        for seconds in (None, 0.1, 2.0, 0.1):
            if seconds is not None:
                dog.learn("step", seconds)
            dog.enter("step")
            beat = HeartbeatFile(dog._file.path).read()
            assert beat is not None and beat.phase == "step"
            limits.append(beat.limit_s)
        assert limits == [60, 5, 20, 20]
        for _ in range(50):
            dog.learn("step", 0.1)
        dog.enter("step")
        assert dog._beat.limit_s == 5 and dog._beat.steps == 5 and dog._beat.batches == 0


def test_beat_is_read_as_it_was_written():
    file = HeartbeatFile()
    try:
        assert HeartbeatFile(file.path).read() is None
        beat = Heartbeat(1.5, 2.5, 3.5, 7, 9, "x" * 32)
        file.write(beat)
        assert HeartbeatFile(file.path).read() == beat
    finally:
        file.remove()


def report(rank: int, **what: object) -> Report:
    usual = {"phase": "step", "seconds": 9.0, "limit_s": 5.0, "batches": 8, "steps": 8, "silent_s": 0.1}
    return Report(rank=rank, host=f"n{rank}", pid=100 + rank, state="S", **(usual | what))  # type: ignore[arg-type]


def test_rank_that_differs_is_named():
    same = [report(rank) for rank in range(4)]
    assert "all 4 ranks in 'step' after 8 steps" in name_the_one(same, 4).why
    assert "hang: the only rank in 'step' after 8 steps" in name_the_one(same[:1], 1).why
    assert "no report from rank 3 " in name_the_one(same[:3], 4).why
    behind = [*same[:3], report(3, phase="data", batches=8, steps=7)]
    assert name_the_one(behind, 4).why.startswith("hang: rank 3 on n3 (pid 103) in 'data'")
    assert name_the_one(behind, 4).hosts == ("n3",) and name_the_one(same, 4).hosts == ()
    ahead = [*same[:3], report(3, phase="agree")]
    assert name_the_one(ahead, 4).why.startswith("hang: rank 3 on n3 (pid 103) in 'agree'")
    pair = [report(0), report(1, phase="agree")]
    assert name_the_one(pair, 2).why.startswith("hang: rank 0 on n0"), "of two the one behind"


def test_reports_are_json_of_every_field(tmp_path):
    one = report(5)
    (tmp_path / REPORT.format(5)).write_text(json.dumps(one.as_dict()))
    assert Report(**json.loads((tmp_path / REPORT.format(5)).read_text())) == one
    assert ExitCode.HUNG == 86


def test_rank_that_is_still_in_a_hook_is_named_beside_those_that_agree():
    found = name_the_one([report(0, phase="agree"), report(1, phase="hooks")], 2).why
    assert "rank 1 on n1" in found and "while others wait in 'agree'" in found
    found = name_the_one([report(0, phase="log"), report(1, phase="hooks")], 2).why
    assert found.startswith("hang: all 2 ranks in 'hooks' and 'log' after")


def test_process_that_watches_and_is_killed_is_missed(tmp_path, caplog):
    with Watchdog(tmp_path / "hang", 3, 4, 1000.0, 1000.0) as watchdog:
        watchdog._monitor.kill()  # pyright: ignore[reportPrivateUsage]
        watchdog._listener.join(timeout=20)  # pyright: ignore[reportPrivateUsage]
        assert "rank 3: the process that watches it was killed: no hang is found" in caplog.text
    caplog.clear()
    with Watchdog(tmp_path / "hang", 3, 4, 1000.0, 1000.0):
        pass
    assert not caplog.text
