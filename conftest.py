"""What every test run of the repository does: slow tests on demand, few threads, no process left behind."""

import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from forks import Forks

# Before anything imports torch or numpy: each xdist worker, and each process that a test starts, computes
# with one thread, unless the caller says otherwise. With a thread a core each they wait for one another.
for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
    os.environ[name] = os.environ.get(name) or "1"

RUN = "FORGE_TEST_RUN"
"""Variable that all processes of one run of pytest carry; tells them from those of another run."""
SLOW = "slow; give --slow"
NO_GPU = "needs a CUDA device"
GRACE_S = 10.0
"""How long a process that was told to end may take."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag for slow tests."""
    parser.addoption("--slow", action="store_true", help="also run the tests that are marked slow")


def pytest_configure(config: pytest.Config) -> None:
    """Name this run; its workers and all that they start inherit the name.

    A command that a test starts must not inherit that SIGHUP is ignored, as it is under `nohup`: a handler is
    what is not inherited, and it ignores the signal here as well.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    if not hasattr(config, "workerinput"):
        os.environ[RUN] = uuid.uuid4().hex


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests that nobody asked for, and those of a GPU where there is none."""
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason=SLOW))
        if item.get_closest_marker("gpu") and not _has_gpu() and "FORGE_GPU_TESTS_ON" not in os.environ:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name no file where a whole kind of tests is skipped: the summary then has one line for all of them."""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason in (SLOW, NO_GPU):
            report.longrepr = ("tests", None, reason)  # type: ignore[assignment]


@cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Starts functions of a test file in processes that can be killed; see `Forks`."""
    forks = Forks()
    yield forks
    forks.close()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note the processes from before the test; those of fixtures are among them."""
    item.stash[_BEFORE] = _running()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Kill the processes that outlive their test, and fail it."""
    yield
    before = item.stash.get(_BEFORE, None)
    if before is None:
        return
    left = _killed(lambda: _of_test(item.nodeid, _running() - before))
    if left:
        pytest.fail(f"processes outlived the test and were killed: {'; '.join(left)}", pytrace=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Once all workers are gone, kill what is left of this run; there being some fails the run."""
    yield
    if hasattr(session.config, "workerinput"):
        return
    left = _killed(lambda: _of_run() - _warm() - {os.getpid()})
    if left:
        sys.stderr.write(f"\nprocesses outlived the tests and were killed: {'; '.join(left)}\n")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


_BEFORE = pytest.StashKey[set[int]]()


def _running() -> set[int]:
    """Ids of all processes; empty where there is no /proc."""
    if not Path("/proc/self").exists():
        return set()
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _of_test(nodeid: str, new: set[int]) -> set[int]:
    """Which of the new processes a test left: descendants of this one, and orphans by their environment."""
    if not new:
        return set()
    parents = {pid: _parent(pid) for pid in _running()}
    orphan, run = f"PYTEST_CURRENT_TEST={nodeid} (", f"{RUN}={os.environ[RUN]}"
    ours = {pid for pid in new if _descends(pid, parents) or (_has(pid, orphan) and _has(pid, run))}
    return ours - _warm()


def _of_run() -> set[int]:
    return {pid for pid in _running() if _parent(pid) is not None and _has(pid, f"{RUN}={os.environ[RUN]}")}


def _warm() -> set[int]:
    """Processes that stay between tests by design: warm ranks, servers of multiprocessing, compilers."""
    found = set(Forks.servers)
    if "torch._inductor.async_compile" in sys.modules:
        found |= {pid for pid in _running() if "torch/_inductor/compile_worker" in _command(pid)}
    if testing := sys.modules.get("forge_parallel.testing"):
        found |= testing.warm_processes()
    if server := sys.modules.get("multiprocessing.forkserver"):
        found.add(server._forkserver._forkserver_pid)
    if tracker := sys.modules.get("multiprocessing.resource_tracker"):
        found.add(tracker._resource_tracker._pid)
    return found


def _parent(pid: int) -> int | None:
    """The parent of a live process; None when it has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state in "ZX" else int(parent)


def _descends(pid: int | None, parents: dict[int, int | None]) -> bool:
    pid = parents.get(pid or 0)
    while pid and pid != os.getpid():
        pid = parents.get(pid)
    return bool(pid)


def _has(pid: int, variable: str) -> bool:
    try:
        return f"\0{variable}".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _killed(find: Callable[[], set[int]]) -> list[str]:
    """Wait a little for processes to end by themselves, kill the rest; returns what was killed."""
    end = time.monotonic() + GRACE_S
    while (left := find()) and time.monotonic() < end:
        time.sleep(0.05)
    names = [f"{pid} {_command(pid)}" for pid in sorted(left)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while left & find():
        time.sleep(0.01)
    return names


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
    return words.strip()[:200]
