"""The real command is signalled in every phase: it ends soon, with the exit code that says what happened."""

import fcntl
import os
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from forge_ckpt.store import Store

PREEMPTED = 85
NUMBERS = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT]


@contextmanager
def started(forge, *arguments, **environment):
    """The command in a process that does not outlive the test."""
    process = subprocess.Popen(
        forge.command("train", *arguments),
        env=forge.environment | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@contextmanager
def two_ranks(forge, *arguments):
    """Two ranks without a launcher around them, so that the exit code of each is seen."""
    with ExitStack() as stack:
        port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
        yield [
            stack.enter_context(
                started(forge, *arguments, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", **port)
            )
            for rank in range(2)
        ]


def wait_until_handled(process, number=signal.SIGHUP, limit_s=20.0):
    """Until the process has a handler for a signal, SIGHUP being the last one: its first own line has run."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        if caught >> (number - 1) & 1:
            return
        time.sleep(0.002)


def wait_for_lock(process, limit_s=60.0):
    """Until the process waits for a file lock that somebody else holds."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and process.poll() is None:
        waiting = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" in line]
        if any(str(process.pid) in words for words in waiting):
            return
        time.sleep(0.01)


def signal_until_gone(process, number, every_s=0.02, limit_s=60.0):
    """Repeat a signal as schedulers do, until there is nobody to send it to."""
    end = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < end:
        process.send_signal(number)
        time.sleep(every_s)
    return process.wait(timeout=1)


@pytest.mark.parametrize("after_s", [0.0, 0.7])
def test_start_ends_as_preempted_when_signalled(forge, tiny, after_s):
    with started(forge, tiny(steps=100000)) as process:
        wait_until_handled(process)
        time.sleep(after_s)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == PREEMPTED, said
    assert "before the first step" in said and "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_start_ends_as_preempted_at_any_moment_and_for_any_signal(forge, tiny, tmp_path, number):
    for tenths in range(0, 45, 3):
        with started(forge, tiny(steps=100000)) as process:
            wait_until_handled(process)
            time.sleep(tenths / 10)
            signal_until_gone(process, number)
            _, said = process.communicate()
        assert process.returncode == PREEMPTED, (tenths, said)
        assert "Traceback" not in said, (tenths, said)


@pytest.mark.slow
@pytest.mark.dist
def test_start_of_two_ranks_ends_as_preempted_when_signalled(forge, tiny):
    for tenths in range(0, 60, 6):
        with two_ranks(forge, tiny(steps=100000)) as ranks:
            for process in ranks:
                wait_until_handled(process)
            time.sleep(tenths / 10)
            for process in ranks:
                process.send_signal(signal.SIGTERM)
            said = [process.communicate(timeout=60)[1] for process in ranks]
        assert [process.returncode for process in ranks] == [PREEMPTED] * 2, (tenths, said)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_run_keeps_its_exit_code_when_signals_repeat_until_it_is_gone(forge, tiny, tmp_path, number):
    run = tmp_path / "runs" / "tiny"
    with started(forge, tiny(steps=100000)) as process:
        forge.wait_for_step(run / "metrics.jsonl", 3, process)
        assert signal_until_gone(process, number) == PREEMPTED
    assert Store(run / "checkpoints").steps()


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_keep_their_exit_code_when_signals_repeat_until_they_are_gone(forge, tiny, tmp_path):
    run = tmp_path / "runs" / "tiny"
    with two_ranks(forge, tiny(steps=100000)) as ranks:
        forge.wait_for_step(run / "metrics.jsonl", 3, ranks[0])
        while any(process.poll() is None for process in ranks):
            for process in ranks:
                process.send_signal(signal.SIGTERM)
            time.sleep(0.02)
        assert [process.returncode for process in ranks] == [PREEMPTED] * 2
    assert Store(run / "checkpoints").newest().world_size == 2


def test_finished_run_stays_done_when_signals_come_at_its_end(forge, tiny, tmp_path):
    with started(forge, tiny(steps=3)) as process:
        progress = tmp_path / "runs" / "tiny" / "checkpoints" / "PROGRESS"
        while process.poll() is None and not (progress.exists() and progress.read_text() == "3"):
            time.sleep(0.002)
        assert signal_until_gone(process, signal.SIGTERM) == 0


def test_wait_for_data_of_another_process_ends_as_preempted_when_signalled(forge, tiny, tmp_path):
    cache = tmp_path / "cache"
    arguments = tiny(steps=3), f'--data.cache_dir="{cache}"'
    forge("train", *arguments)
    locks = list(cache.rglob("*.lock"))
    assert locks
    for lock in locks:
        for made in lock.parent.glob(f"{lock.stem}*"):
            if made.is_dir():
                shutil.rmtree(made)
    shutil.rmtree(tmp_path / "runs")
    with ExitStack() as stack:
        for lock in locks:
            fcntl.flock(stack.enter_context(lock.open("w")), fcntl.LOCK_EX)
        process = stack.enter_context(started(forge, *arguments))
        wait_for_lock(process)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=20)
    assert process.returncode == PREEMPTED, said


def test_run_under_nohup_does_not_stop_when_the_terminal_goes_away(forge, tiny, tmp_path):
    line = ["nohup", *forge.command("train", tiny(steps=12))]
    process = subprocess.Popen(
        line, env=forge.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        forge.wait_for_step(tmp_path / "runs" / "tiny" / "metrics.jsonl", 3, process)
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
