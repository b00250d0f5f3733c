"""Worker processes: in order, deaf to the signals of a job, gone with the process they work for."""

import itertools
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.job_signals import STEP_SIGNALS
from forge_data.loading.loader import Loader, build_loader
from forge_data.sources.config import TokensConfig


@pytest.fixture
def loader(make_store) -> Loader:
    config = DataConfig(max_tokens=8, sources=[TokensConfig(path=str(make_store("s", [4000])))])
    return build_loader(config, "train", micro_batch=1, global_batch=1)


def _rows(items: object, count: int) -> list[list[int]]:
    return [item[0].inputs["tokens"][0].tolist() for item in itertools.islice(items, count)]  # type: ignore[call-overload]


def _is_gone(pid: int, within_s: float = 10) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_workers_go_on_through_the_signals_of_a_job_from_their_first_moment(loader: Loader) -> None:
    expected = _rows(loader, 2000)
    loader.workers = 2
    items = iter(loader)
    processes = loader._open[0].processes
    for process, number in itertools.product(processes, STEP_SIGNALS):
        process.send_signal(number)
    found = _rows(items, 4)
    for process, number in itertools.product(processes, STEP_SIGNALS):
        process.send_signal(number)
    assert found + _rows(items, 1996) == expected
    loader.close()


def test_close_ends_workers_at_once_and_may_be_called_again(loader: Loader) -> None:
    loader.workers = 3
    items = iter(loader)
    next(items)
    pids = [process.pid for process in loader._open[0].processes]
    start = time.monotonic()
    loader.close()
    loader.close()
    assert time.monotonic() - start < 5
    assert all(_is_gone(pid, 0.1) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_killed_worker_is_an_error_at_once_however_much_it_had_prepared(
    loader: Loader, number: signal.Signals
) -> None:
    loader.workers = 2
    items = iter(loader)
    _rows(items, 2)
    killed = loader._open[0].processes[1]
    killed.send_signal(number)
    killed.wait()
    with pytest.raises(RuntimeError, match=number.name):
        next(items)
    loader.close()


def test_error_of_a_worker_is_raised_where_its_item_is_asked_for(loader: Loader, tmp_path: Path) -> None:
    """The file of the store becomes shorter while the workers read it: before they look, or after."""
    loader.workers = 2
    items = iter(loader)
    _rows(items, 2)
    os.truncate(tmp_path / "s" / "tokens.bin", 8)
    with pytest.raises((DataError, RuntimeError), match=r"tokens\.bin has 8 bytes|a file .* became shorter"):
        _rows(items, 1_000_000)
    loader.close()


SCRIPT = """
import os, pickle, signal, sys
from forge_data.loading.workers import Workers
items = Workers(pickle.loads(bytes.fromhex(sys.argv[1])), 2)
next(items)
print(*(p.pid for p in items.processes), flush=True)
{ending}
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("raise ZeroDivisionError", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os._exit(3)", 3),
    ],
)
def test_process_ends_within_seconds_however_it_ends_and_its_workers_with_it(
    loader: Loader, ending: str, code: int
) -> None:
    command = [sys.executable, "-c", SCRIPT.format(ending=ending), pickle.dumps(loader.batches).hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert len(done.stdout.split()) == 2
    assert all(_is_gone(int(pid)) for pid in done.stdout.split())


def test_workers_need_no_torch() -> None:
    code = "import sys, forge_data.loading.workers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
