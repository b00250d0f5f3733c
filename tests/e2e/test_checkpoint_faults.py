"""A training process that is killed, or whose disk fails, at any moment loses no published checkpoint.

`--slow` draws some faults of each kind in about three minutes; with `FORGE_FAULTS=long` it is 300 kills of
`forge train` at random moments, and a fault at every call of a save (see tests/shared/faults.py).
"""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
import xxhash
from faults import LONG, figure
from forge_ckpt import Store, TrainState
from forks import load
from runs import losses

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(3600)]

STEPS = 60
FLAGS = (
    "--checkpoint.every_steps=1",
    "--checkpoint.keep=3",
    "--train.global_batch=12",
    "--model.num_layers=1",
    "--model.dim=16",
    "--model.attention.num_kv_heads=2",
)
KILLS = {(1, True): 60, (1, False): 60, (2, True): 50, (2, False): 50, (3, True): 40, (3, False): 40}
FEW = {(1, True): 8, (1, False): 6, (2, True): 5, (2, False): 4, (3, True): 3, (3, False): 3}


def fingerprint(store: Store, step: int) -> str:
    """Of every bit of a checkpoint that training goes on from."""
    opened, hashed = store.verify(step), xxhash.xxh3_128()
    for key, tensor in sorted(store.tensors(step).items()):
        hashed.update(key.encode() + tensor.flatten().view(torch.uint8).numpy().tobytes())
    hashed.update(json.dumps([opened.meta, opened.values], sort_keys=True).encode())
    return hashed.hexdigest()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Job:
    """`forge train` on some ranks, each forked from a process that has imported it."""

    def __init__(self, forge, forks, path: Path, ranks: int, flags: tuple[str, ...]) -> None:
        self._forge, self._forks, self._ranks = forge, forks, ranks
        self._line, self.out = ["train", str(path), *flags], path.parent

    def start(self) -> list[int]:
        more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(self._ranks)}
        pids = []
        for rank in range(self._ranks):
            place = more | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if self._ranks > 1 else {}
            files = [str(self.out / f"{kind}{rank}") for kind in ("out", "err")]
            environment = dict(self._forge.environment) | place
            pids.append(self._forks.start_in(*self._forge.warm, self._line, environment, os.getcwd(), *files))
        return pids

    def wait(self, pids: list[int]) -> list[int]:
        return [self._forks.wait(pid) for pid in pids]

    def said(self) -> str:
        return "".join((self.out / f"{kind}0").read_text() for kind in ("out", "err"))


def kill(pids: list[int], draw: random.Random) -> None:
    """All of them; half of the time one dies before the others, which may notice."""
    first = draw.choice(pids)
    os.kill(first, signal.SIGKILL)
    if draw.random() < 0.5:
        time.sleep(draw.uniform(0, 0.05))
    for pid in pids:
        if pid != first:
            os.kill(pid, signal.SIGKILL)


def newest(folder: Path) -> int:
    return max(Store(folder).steps(), default=0)


def await_kill(folder: Path, more: int, draw: random.Random) -> int:
    """Wait for a random moment; returns the newest step seen before it."""
    if draw.random() < 0.2:  # also while it starts, and loads
        time.sleep(draw.uniform(0, 1.5))
        return newest(folder)
    begin, end = newest(folder), time.monotonic() + 60
    while newest(folder) < min(begin + more, STEPS) and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.08))
    return newest(folder)


@pytest.mark.parametrize(("ranks", "asynchronous"), KILLS)
def test_run_killed_at_random_moments_goes_on_from_its_newest_checkpoint(
    forge, forks, tiny, tmp_path, ranks, asynchronous
):
    flags = (*FLAGS, f"--checkpoint.asynchronous={str(asynchronous).lower()}")
    kills, draw = (KILLS if LONG else FEW)[ranks, asynchronous], random.Random(ranks)
    whole = tiny(steps=STEPS, name="whole.toml", root=tmp_path / "whole")
    left_alone = Job(forge, forks, whole, ranks, (*flags, "--checkpoint.keep=1000"))
    assert set(left_alone.wait(left_alone.start())) == {0}, left_alone.said()
    store = Store(tmp_path / "whole" / "tiny" / "checkpoints")
    reference = {step: fingerprint(store, step) for step in store.steps()}
    curve = losses(tmp_path / "whole" / "tiny")
    job, run = Job(forge, forks, tiny(steps=STEPS), ranks, flags), tmp_path / "runs" / "tiny"
    folder, left, complete = run / "checkpoints", 0, 0
    for number in range(kills):
        pids = job.start()
        seen = await_kill(folder, draw.randint(1, 6), draw)
        kill(pids, draw)
        codes = job.wait(pids)
        assert set(codes) <= {0, -signal.SIGKILL, 1}, job.said()
        told = re.search(r"begins     at step (\d+)", job.said())
        assert told is None or int(told[1]) == left, f"kill {number}: began at {told[1]}, saved was {left}"
        left = newest(folder)
        assert left >= seen and left >= Store(folder).progress()
        for step in Store(folder).steps():
            assert fingerprint(Store(folder), step) == reference[step], f"kill {number}, step {step}"
        if left == STEPS:
            assert job.wait(job.start()) == [0] * ranks, job.said()
            assert losses(run) == curve
            shutil.rmtree(tmp_path / "runs")
            left, complete = 0, complete + 1
    beside = "asynchronous" if asynchronous else "synchronous"
    figure(f"SIGKILL of `forge train` at a random moment, {ranks} rank{'s'[: ranks > 1]}, {beside}", kills,
           "each next start from the newest published step, all checkpoints bit-identical to those of a run "
           "that was left alone")  # fmt: skip


# every call of a save

TRACE = (
    "trace=?open,?openat,?creat,?write,?writev,?pwrite64,?read,?pread64,?lseek,?fsync,?fdatasync,?close,?rename,"
    "?renameat,?renameat2,?mkdir,?mkdirat,?rmdir,?unlink,?unlinkat,?link,?linkat,?getdents64,?stat,?lstat,"
    "?fstat,?newfstatat,?statx,?readlink,?ftruncate,?fcntl,?ioctl"
)
ERRORS = ("ENOSPC", "EIO", "EROFS", "ESTALE")
READ_ERRORS = ("EIO", "ESTALE") if LONG else ("EIO",)


@cache
def saving() -> ModuleType:
    """What the ranks run; imported where a test needs it."""
    return load(str(Path(__file__).with_name("saving.py")))


@pytest.fixture(scope="session")
def strace() -> None:
    """Injects the faults; installed where root can do that and apt answers."""
    if shutil.which("strace") is None and shutil.which("apt-get") and os.geteuid() == 0:
        for command in ("update", "install -y strace"):
            line = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120", *command.split()]
            subprocess.run(line, capture_output=True, timeout=300, check=False)
    if shutil.which("strace") is None:
        pytest.skip("needs strace, which apt could not install: apt-get install strace")


class Save:
    """Ranks that load and save once, one of them under strace."""

    def __init__(self, forks, folder: Path, ranks: int, victim: int, mode: str) -> None:
        self._forks, self._ranks, self._victim, self._mode = forks, ranks, victim, mode
        self._given, self.root = folder / "given", folder / "run" / "checkpoints"
        self._log = folder / "strace"
        for step in (1, 2) if mode == "load" else (1,):
            Store(self._given).save(step, TrainState(*self._state(step)).capture())

    @staticmethod
    def _state(step: int):
        model, optimizer = saving().trained(step)
        return [model], optimizer

    def run(self, *inject: str) -> list[int]:
        """The exit codes of all ranks; what lives on when the victim was killed is killed as well."""
        shutil.rmtree(self.root.parent, ignore_errors=True)
        shutil.copytree(self._given, self.root)
        port = free_port()
        pids = [
            self._forks.start(
                saving().rank_of_training,
                self.root,
                rank,
                self._ranks,
                port,
                rank == self._victim,
                self._mode,
            )
            for rank in range(self._ranks)
        ]
        victim = pids[self._victim]
        end = time.monotonic() + 60
        while not (self.root.parent / f"pid-{victim}").exists() and time.monotonic() < end:
            time.sleep(0.002)
        line = ["strace", "-f", "-y", "-qq", "-o", str(self._log), "-e", TRACE, "-p", str(victim)]
        strace = subprocess.Popen([*line, *(word for one in inject for word in ("-e", one))])
        codes = {self._victim: self._forks.wait(victim)}
        strace.wait(20)
        for rank, pid in enumerate(pids):
            if rank != self._victim:
                if codes[self._victim] == -signal.SIGKILL:
                    os.kill(pid, signal.SIGKILL)
                codes[rank] = self._forks.wait(pid)
        return [codes[rank] for rank in range(self._ranks)]

    def calls(self) -> list[tuple[str, int]]:
        """Each call that touches a checkpoint: its name, and the how many-th of its thread it is."""
        counts, found = Counter(), []
        for line in self._log.read_text(errors="replace").splitlines():
            if match := re.match(r"(\d+)\s+(\w+)\((.*)", line):
                thread, name, arguments = match.groups()
                counts[thread, name] += 1
                if str(self.root.parent) in arguments:
                    found.append((name, counts[thread, name]))
        return list(dict.fromkeys(found))

    def check(self, codes: list[int], what: tuple) -> str:
        """Whatever came: published is what was said to be, and the next start goes on from the newest."""
        store = Store(self.root)
        steps = store.steps()
        for step in steps:
            store.verify(step)
        told = {code for code in codes if code >= saving().SAVED}
        assert len(told) <= 1, (what, codes, "ranks disagree")
        for code in told:
            failed = code - saving().SAVED
            assert 2 in steps or 3 in steps or failed & saving().FAILED, (what, code, steps)
            assert 3 in steps or failed & saving().OTHER, (what, code, steps)
            # who lives on when the first rank dies cannot know that it had published
            assert 3 not in steps or not failed & saving().OTHER or -signal.SIGKILL in codes, (what, code)
        assert set(codes) <= {*told, -signal.SIGKILL}, (what, codes)
        model, optimizer = saving().trained(0)
        found = Store(self.root, keep=2).resume(TrainState([model], optimizer).targets)
        assert found is not None and found.step == max(steps), what
        assert saving().bits(model, optimizer) == saving().bits(*saving().trained(found.step)), what
        again = Store(self.root, keep=2)
        again.save(9, TrainState(*self._state(9)).capture())
        assert again.verify(9).step == 9
        assert not [p.name for p in self.root.iterdir() if p.name.startswith((".tmp", ".trash", ".swap"))]
        if -signal.SIGKILL in codes:
            return "killed"
        return {0: "saved", saving().FAILED: "a failed save", saving().OTHER: "a failed save"}.get(
            told.pop() - saving().SAVED, "failed"
        )


def places_of(save: Save) -> list[tuple[str, int]]:
    codes = save.run()
    assert set(codes) <= {saving().SAVED, 2}, codes
    found = save.calls()
    assert {"openat", "fsync", "write"} <= {name for name, _ in found} or save._mode == "load"
    assert len(found) > 10
    return found[:: 1 if LONG else SHARE]


SHARE = 6
WHICH = "each" if LONG else f"every {SHARE}th"
WHERE = [(1, 0, "sync"), (1, 0, "async"), (2, 0, "sync"), (2, 1, "async"), (3, 0, "async"), (3, 2, "sync")]


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize(("ranks", "victim", "mode"), WHERE)
def test_killed_at_every_call_of_a_save(forks, tmp_path, ranks, victim, mode):
    save = Save(forks, tmp_path, ranks, victim, mode)
    outcomes, where = Counter(), places_of(save)
    for name, when in where:
        codes = save.run(f"inject={name}:signal=KILL:when={when}")
        outcomes[save.check(codes, (name, when))] += 1
    assert outcomes["killed"] > 0.9 * len(where), outcomes
    figure(f"SIGKILL at {WHICH} file-system call of a save, rank {victim} of {ranks}, {mode}", len(where),
           f"nothing published lost ({told(outcomes)})")  # fmt: skip


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize(("ranks", "victim"), [(1, 0), (2, 0), (2, 1), (3, 2)])
def test_error_at_every_call_of_a_save(forks, tmp_path, ranks, victim):
    save = Save(forks, tmp_path, ranks, victim, "sync")
    outcomes, where = Counter(), places_of(save)
    for index, (name, when) in enumerate(where):
        for error in ERRORS if LONG else [ERRORS[index % len(ERRORS)]]:
            codes = save.run(f"inject={name}:error={error}:when={when}")
            assert min(codes) >= saving().SAVED, (name, when, error, codes)
            outcomes[save.check(codes, (name, when, error))] += 1
    figure(f"{', '.join(ERRORS)} at {WHICH} file-system call of a save, rank {victim} of {ranks}",
           outcomes.total(), f"no false success, the run goes on ({told(outcomes)})")  # fmt: skip


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize(("ranks", "victim"), [(1, 0), (2, 1)])
def test_read_error_at_every_call_of_a_load(forks, tmp_path, ranks, victim):
    save = Save(forks, tmp_path, ranks, victim, "load")
    outcomes, where = Counter(), places_of(save)
    for name, when in where:
        for error in READ_ERRORS:
            codes = save.run(f"inject={name}:error={error}:when={when}")
            assert len(set(codes)) == 1 and codes[0] in (1, 2, 9), (name, when, error, codes)
            outcomes[{1: "the older one taken", 2: "loaded", 9: "refused"}[codes[0]]] += 1
            assert Store(save.root).steps() == [1, 2], (name, when, error)
    figure(f"{', '.join(READ_ERRORS)} at {WHICH} file-system call of a load, rank {victim} of {ranks}",
           outcomes.total(), f"nothing put aside, nothing else loaded ({told(outcomes)})")  # fmt: skip


def told(outcomes: Counter[str]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in sorted(outcomes.items()))
