"""Runs the points of a study on this machine, a few at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from forge_data.store.tokenize import cores
from forge_resilience.exit_codes import ExitCode

from forge_trainer.study.points import Point
from forge_trainer.study.state import EXITED, log_of

TRIES = 3
"""The most starts of a stopped run in one call; the next call starts it again."""

POLL_S = 0.2
Say = Callable[[str], None]


def run_here(points: Sequence[Point], root: Path, configs: Path, jobs: int, say: Say) -> bool:
    """Run the runs, `jobs` at a time; start a run again if it is stopped before its end.

    A signal is passed to the active runs, which save and end; then no further run is started.

    Args:
        points: the runs, in the order of their start.
        root: folder of the runs.
        configs: folder of their configurations.
        jobs: number of runs at a time; each has its share of the cores.
        say: called with a message at each end.

    Returns:
        Whether all runs were started, and no signal came.
    """
    waiting, running = list(points), dict[str, tuple[Point, subprocess.Popen[bytes], float]]()
    tries: dict[str, int] = {}
    threads = str(max(1, cores() // jobs))
    with _stopping(running) as stopped:
        while running or (waiting and not stopped):
            while waiting and len(running) < jobs and not stopped:
                point = waiting.pop(0)
                tries[point.name] = tries.get(point.name, 0) + 1
                running[point.name] = point, _start(point, root, configs, threads), time.monotonic()
            time.sleep(POLL_S)
            for name, (point, process, since) in list(running.items()):
                if (code := process.poll()) is None:
                    continue
                del running[name]
                with log_of(root, name).open("a") as log:
                    log.write(f"{EXITED}{code}\n")
                again = not stopped and tries[name] < TRIES and (code == ExitCode.PREEMPTED or code < 0)
                waiting += [point] * again
                took = f"after {time.monotonic() - since:.0f} s"
                say(f"{name}: {_outcome(code)} {took}{', starts again' if again else ''}")
    return not stopped and not waiting


def _outcome(code: int) -> str:
    if code == 0:
        return "complete"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _start(point: Point, root: Path, configs: Path, threads: str) -> subprocess.Popen[bytes]:
    log = log_of(root, point.name)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "forge_trainer", "train", str(configs / f"{point.name}.toml")]
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": threads} | os.environ,
            start_new_session=True,  # a signal of the terminal comes to them through this process, once
        )


@contextmanager
def _stopping(running: dict[str, tuple[Point, subprocess.Popen[bytes], float]]) -> Iterator[list[int]]:
    """Yield a list of the signals that came inside this context; each is passed to the runs."""
    came: list[int] = []

    def hand_on(number: int, frame: object) -> None:
        came.append(number)
        for _, process, _ in running.values():
            process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
