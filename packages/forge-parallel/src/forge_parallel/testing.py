"""Tests on several real ranks: a pool of warm processes, and the comparison with one process."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch._dynamo",
]
START_S = 300.0
"""How long processes may take to start, which is mostly to load torch."""
GRACE_S = 10.0
"""After one rank failed, how long the others may take to notice."""
MOST_THREADS = 64
"""Groups of gloo that are destroyed may leave threads that poll: a rank with more of them is replaced."""


class RankError(AssertionError):
    """A rank failed, died or hung; the message holds the output of each rank."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60) -> list[Any]:
    """Run a function on several ranks at once, in a gloo group.

    The ranks are processes that stay warm between calls, so that a job costs tenths of a second.

    A job starts with a fresh group and with RANK, LOCAL_RANK and WORLD_SIZE set; the next job finds all else
    that it changes in its process (random state, modules). The file of `fn` is loaded once a rank, by path. A
    rank that died or hung fails the job, and the next one gets new processes. They end with this process.

    Args:
        fn: a function of a module or test file, not nested; called as fn(*args) on every rank.
        world_size: number of ranks.
        args: must pickle, by names that can be imported: no classes of a test file.
        timeout_s: for the whole job, without the start of its processes.

    Returns:
        The results of the ranks, by rank.

    Raises:
        RankError: a rank raised, died, or did not end in time.
    """
    return _pool().run(fn, world_size, args, timeout_s)


def warm_processes() -> set[int]:
    """Return the ids of the ranks that wait for the next job: a check for leaked processes spares them."""
    return {process.pid for pool in _the_pool for process, _ in pool._workers}


def assert_matches_single(
    fn: Callable[..., Mapping[str, Sequence[float]]],
    world_size: int,
    *args: Any,
    rtol: Mapping[str, float],
    timeout_s: float = 120,
) -> None:
    """Compare a training run on several ranks with the same run on one.

    `fn` builds, parallelizes and trains; it finds its rank by `Env.detect()` and must draw the same global
    batches whatever the number of ranks. On one rank it should not shard at all (`Mesh(device)`), so that it
    is an independent reference.

    Args:
        fn: returns curves by name, such as {"loss": [...], "grad_norm": [...]}; must use its process group.
        world_size: number of ranks.
        args: passed to `fn`.
        rtol: the relative tolerance of each curve, for every rank beside the single process.
        timeout_s: for each of the two jobs.

    Raises:
        AssertionError: names the curve, the rank and the first step that differ.
    """
    single = run_ranks(fn, 1, *args, timeout_s=timeout_s)[0]
    for rank, curves in enumerate(run_ranks(fn, world_size, *args, timeout_s=timeout_s)):
        for name, bound in rtol.items():
            pairs = list(zip(single[name], curves[name], strict=True))
            assert pairs, f"{name} is empty"
            for step, (one, many) in enumerate(pairs):
                near = abs(one - many) <= bound * abs(one)
                assert near, (
                    f"{name} of rank {rank} at step {step}: {many!r}, single process {one!r}, rtol {bound}"
                )


class _Pool:
    """Processes forked from a server that has torch loaded."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOAD, __name__])
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout_s: float
    ) -> list[Any]:
        address = _address(fn)
        try:
            self._grow(world_size)
            workers = self._workers[:world_size]
            with tempfile.TemporaryDirectory() as folder:
                for rank, (_, pipe) in enumerate(workers):
                    job = (address, args, rank, world_size, os.path.join(folder, "store"), timeout_s)
                    pipe.send_bytes(pickle.dumps(job))
                answers = self._collect(workers, timeout_s)
                left = self._have_left(workers, answers)
        except BaseException:
            # Also when a test times out in here: the late answers must not reach the next job.
            self.close()
            raise
        bad = {rank: text for rank, (state, text) in answers.items() if state != "ok"}
        if not left or any(_threads(process.pid) > MOST_THREADS for process, _ in self._workers):
            self.close()
        if bad:
            messages = "\n".join(f"-- rank {rank}: {text}" for rank, text in sorted(bad.items()))
            raise RankError(f"{len(bad)} of {world_size} ranks failed\n{messages}")
        return [answers[rank][1] for rank in range(world_size)]

    def _grow(self, world_size: int) -> None:
        if not all(process.is_alive() for process, _ in self._workers):
            self.close()
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        started = len(self._workers)
        while len(self._workers) < world_size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
        self._await(self._workers[started:])

    def _await(self, workers: Sequence[tuple[Any, Connection]]) -> None:
        """Wait until processes can take a job, so that its time is not spent on their start."""
        end = time.monotonic() + START_S
        try:
            for _, pipe in workers:
                if not pipe.poll(max(0.0, end - time.monotonic())):
                    raise RankError(f"a rank did not start within {START_S:.0f} s")
                pipe.recv_bytes()
        except (EOFError, ConnectionError):
            raise RankError("a rank died at its start") from None

    def _collect(
        self, workers: Sequence[tuple[Any, Connection]], timeout_s: float
    ) -> dict[int, tuple[str, Any]]:
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(workers)}
        answers: dict[int, tuple[str, Any]] = {}
        end = time.monotonic() + timeout_s
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(waiting), timeout=left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    answers[rank] = ("died", f"the process died, exit code {_exit_code(workers[rank][0])}")
                if answers[rank][0] != "ok":
                    end = min(end, time.monotonic() + GRACE_S)
        for rank in waiting.values():
            answers[rank] = ("hung", "did not answer in time")
        return answers

    def _have_left(
        self, workers: Sequence[tuple[Any, Connection]], answers: Mapping[int, tuple[str, Any]]
    ) -> bool:
        """Wait until all ranks have left the group of their job; returns whether they may take another."""
        if any(state in ("died", "hung") for state, _ in answers.values()):
            return False
        end = time.monotonic() + GRACE_S
        try:
            return all(
                pipe.poll(max(0.0, end - time.monotonic())) and pipe.recv_bytes() for _, pipe in workers
            )
        except (EOFError, ConnectionError):
            return False

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers.clear()


def _threads(pid: int) -> int:
    """Return the number of threads of a process, if the system reports it."""
    folder = f"/proc/{pid}/task"
    return len(os.listdir(folder)) if os.path.isdir(folder) else 0


def _exit_code(process: Any) -> int | None:
    process.join(5)
    return process.exitcode


_the_pool: list[_Pool] = []


def _pool() -> _Pool:
    if not _the_pool:
        _the_pool.append(_Pool())
        atexit.register(_the_pool[0].close)
    return _the_pool[0]


def _address(fn: Callable[..., Any]) -> tuple[str, str]:
    """File and qualified name: test files need not be importable by name."""
    if "<locals>" in fn.__qualname__:
        raise TypeError(f"{fn.__qualname__} is nested; give run_ranks a function of a module")
    return fn.__code__.co_filename, fn.__qualname__


def _find(address: tuple[str, str]) -> Callable[..., Any]:
    path, qualname = address
    name = "ranks_" + path.replace("/", "_").replace(".", "_")
    module = sys.modules.get(name)
    if module is None:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    target: Any = module
    for part in qualname.split("."):
        target = getattr(target, part)
    return target


def _serve(pipe: Connection) -> None:
    """The loop of a rank's process: receive a function, run it, answer."""
    import torch

    torch.set_num_threads(1)
    pipe.send_bytes(b"ready")
    while True:
        try:
            job = pipe.recv_bytes()
        except (EOFError, ConnectionError):
            return
        address, args, *place = pickle.loads(job)
        answered = False
        try:
            with _group(*place):
                pipe.send_bytes(pickle.dumps(("ok", _find(address)(*args))))
                answered = True
        except BaseException:
            if not answered:
                pipe.send_bytes(pickle.dumps(("raised", traceback.format_exc())))
        pipe.send_bytes(b"left")


@contextmanager
def _group(rank: int, world_size: int, store: str, timeout_s: float) -> Iterator[None]:
    """Enter the default group of a job. A quick rank does not leave while a slow one still connects.

    This holds for the default group and for groups that the job makes: torch has no barrier after these. A
    rank that fails leaves at once, so that the others notice.
    """
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        dist.barrier()
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()
