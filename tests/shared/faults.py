"""Faults that tests inject into checkpoints, ranks as threads to inject them into, and the figures found.

`FORGE_FAULTS=long` makes the fault tests draw as many faults as issue 11 asks for (about half an hour on two
cores); without it they take a few minutes. With `FORGE_FAULTS_JSON=<file>` each test writes its figure there,
and `python tests/shared/faults.py FILE` keeps them in benchmarks/results, and makes the table of
docs/checkpoints.md.
"""

import errno
import fcntl
import io
import json
import os
import pickle
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

LONG = os.environ.get("FORGE_FAULTS") == "long"
ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "benchmarks" / "results" / "checkpoint_faults.json"
PAGE = ROOT / "docs" / "checkpoints.md"
BEGIN, END = "<!-- faults: begin -->\n", "<!-- faults: end -->\n"


def figure(fault: str, injected: int, outcome: str) -> None:
    """Say what was injected how often and what came of it; keep it where `FORGE_FAULTS_JSON` says."""
    sys.stdout.write(f"{fault}: {injected}: {outcome}\n")
    if not (path := os.environ.get("FORGE_FAULTS_JSON")):
        return
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = json.loads(file.read() or "{}")
        known[fault] = {"injected": injected, "outcome": outcome}
        file.truncate(0)
        file.write(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def table() -> str:
    """The figures as the docs show them."""
    rows = [f"| {fault} | {f['injected']:,} | {f['outcome']} |" for fault, f in read_figures().items()]
    return "\n".join(["| fault | injected | outcome |", "|---|---|---|", *rows]) + "\n"


def read_figures() -> dict[str, dict[str, Any]]:
    """Those that are kept in the repository."""
    return json.loads(FIGURES.read_text())["results"]


class Killed(BaseException):
    """The process of a rank ends here."""


class Calls:
    """Counts the calls of one thread that look at or change a disk, and does something before one of them.

    Args:
        monkeypatch: puts everything back.

    Attributes:
        names: of the calls that were counted.
        paths: what they were about.
        unreadable: a folder whose files give read errors, to every thread.
    """

    NAMES = ("rename", "replace", "fsync", "mkdir", "listdir", "open", "unlink", "rmdir", "stat")

    def __init__(self, monkeypatch: Any) -> None:
        self.names: list[str] = []
        self.paths: list[str] = []
        self._thread = -1
        self._at, self._action = -1, lambda: None
        self._dead = False
        self.unreadable: Path | None = None
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))
        monkeypatch.setattr(io, "open", self._counted("io.open", io.open))

    def before(self, at: int, action: Callable[[], None]) -> None:
        """Begin to count in this thread; before call `at`, the first being 0, do something."""
        self.names.clear(), self.paths.clear()
        self._thread, self._at, self._action, self._dead = threading.get_ident(), at, action, False

    def kill(self) -> None:
        """End the process that this thread stands for: none of its calls does anything any more."""
        self._dead = True
        raise Killed

    def fail(self, number: int) -> None:
        """As the disk does it."""
        raise OSError(number, os.strerror(number))

    def stop(self) -> None:
        """Count no more."""
        self._thread, self._dead = -1, False

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.unreadable and str(args[0]).startswith(str(self.unreadable)) and "open" in name:
                self.fail(errno.EIO)
            if threading.get_ident() == self._thread:
                if self._dead:
                    raise Killed
                self.names.append(name)
                self.paths.append(str(args[0]) if args else "")
                if len(self.names) - 1 == self._at:
                    self._thread, thread = -1, self._thread
                    try:
                        self._action()
                    finally:
                        self._thread = thread
            return original(*args, **kwargs)

        return call


class Group:
    """Ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.values: list[bytes] = [b""] * size
        self.handed: dict[tuple[int, int], Any] = {}
        self.handed_out = threading.Condition()


def thread_ranks(group: Group, rank: int) -> Any:
    """A `forge_ckpt.ranks.Ranks` whose ranks are threads; when one ends, the others fail as with gloo."""
    from forge_ckpt.ranks import Ranks

    class ThreadRanks(Ranks):
        def gather(self, value: Any) -> list[Any]:
            group.values[rank] = pickle.dumps(value)
            group.barrier.wait(60)
            values = [pickle.loads(data) for data in group.values]
            group.barrier.wait(60)
            return values

        def to_first(self, value: Any) -> list[Any]:
            everyone = self.gather(value)
            return everyone if rank == 0 else []

        def _broadcast(self, values: list[Any], source: int) -> list[Any]:
            return self.gather(values)[source]

        def swap(self, gives: Any, to: int, takes: Any, source: int) -> None:
            with group.handed_out:
                group.handed[rank, to] = [tensor.clone() for tensor in gives]
                group.handed_out.notify_all()
                group.handed_out.wait_for(lambda: (source, rank) in group.handed, 60)
                for tensor, values in zip(takes, group.handed.pop((source, rank)), strict=True):
                    tensor.copy_(values)

    made = ThreadRanks()
    made.rank, made.size = rank, group.size
    return made


def on_ranks(size: int, work: Callable[[int, Any], Any]) -> list[Any]:
    """Call `work(rank, ranks)` on each rank; returns what each returned or raised."""
    from forge_ckpt import CheckpointError

    group, results = Group(size), [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, thread_ranks(group, rank))
        except BaseException as error:
            results[rank] = error
            if not isinstance(error, CheckpointError):  # those are raised on all ranks
                group.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    return results


def files(folder: Path) -> dict[str, bytes]:
    """What is in a folder, byte for byte."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def write_files(folder: Path, found: dict[str, bytes]) -> None:
    """Make a folder hold exactly these files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in found.items():
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from report import write

    write(FIGURES.stem, json.loads(Path(sys.argv[1]).read_text()))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
