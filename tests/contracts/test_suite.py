"""What the conftest of the repository promises, seen from outside: pytest runs on a small suite."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = """
import os, subprocess, sys, pytest
WAIT = "import time; print(flush=True); time.sleep(600)"

def start(**options):
    process = subprocess.Popen([sys.executable, "-c", WAIT], stdout=subprocess.PIPE, **options)
    process.stdout.readline()
    process.stdout.close()
    with open("pids", "a") as file:
        file.write(f"{process.pid}\\n")
    return process

@pytest.fixture(scope="module")
def served():
    process = start()
    yield process
    process.kill()
    process.wait()

def test_uses_what_a_fixture_started(served):
    assert served.poll() is None

def test_goes_on_using_it(served):
    assert served.poll() is None

def test_ends_what_it_starts():
    process = start()
    process.kill()
    process.wait()

def test_forgets_a_child():
    start()

def test_forgets_an_orphan_in_a_session_of_its_own():
    pid = os.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c",
            "import subprocess, sys; long = 'import time; time.sleep(600)';"
            "p = subprocess.Popen([sys.executable, '-c', long], start_new_session=True);"
            "open('pids', 'a').write(f'{p.pid}\\\\n')"])
    os.waitpid(pid, 0)

def test_has_one_thread():
    assert os.environ["OMP_NUM_THREADS"] == "1"

@pytest.mark.slow
def test_takes_long():
    pass
"""


def is_alive(pid: str) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def run_pytest(folder: Path, *options: str, **variables: str) -> tuple[int, str]:
    """Run a small suite with our conftest; returns the exit code and what was printed."""
    (folder / "conftest.py").write_text(
        (ROOT / "conftest.py").read_text().replace("GRACE_S = 10.0", "GRACE_S = 0.2")
    )
    (folder / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {ROOT}/tests/shared\naddopts = -p xdist\nmarkers =\n    slow: takes long\n"
    )
    (folder / "test_small.py").write_text(SMALL)
    clean = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-ra", *options]
    done = subprocess.run(command, cwd=folder, env=clean | variables, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_suite_kills_and_names_what_outlives_a_test(tmp_path: Path):
    code, text = run_pytest(tmp_path, "-n", "1")
    failed = {line.split(" - ")[0] for line in text.splitlines() if line.startswith(("ERROR", "FAILED"))}
    assert failed == {
        "ERROR test_small.py::test_forgets_a_child",
        "ERROR test_small.py::test_forgets_an_orphan_in_a_session_of_its_own",
    }, text
    assert code == 1 and "6 passed, 1 skipped, 2 errors" in text
    started = (tmp_path / "pids").read_text().split()
    assert len(started) == 4 and not any(map(is_alive, started))


@pytest.mark.parametrize(("options", "outcome"), [((), "1 skipped"), (("--slow",), "1 passed")])
def test_suite_runs_slow_tests_on_demand(tmp_path: Path, options: tuple[str, ...], outcome: str):
    assert outcome in run_pytest(tmp_path, "-k", "takes_long", *options)[1]


def test_suite_leaves_the_number_of_threads_to_who_says_it(tmp_path: Path):
    code, text = run_pytest(tmp_path, "-k", "one_thread", OMP_NUM_THREADS="3")
    assert code == 1 and "assert '3' == '1'" in text
