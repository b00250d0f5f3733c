"""Which rank hangs, from the reports of the ranks. Imports nothing heavy."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forge_resilience.finding import Finding, short_names

MARK = "hang"
"""Its presence in the folder of reports tells the other ranks to report as well."""

REPORT = "rank-{}.json"
VERDICT = "verdict.txt"

LAST = ("agree", "save")
"""What ends a step, in this order."""

SILENT_S = 2.0
"""A rank whose threads have not run Python for so long holds the GIL in C code, or does not run at all."""


@dataclass(frozen=True)
class Report:
    """The activity of one rank when a hang was noticed.

    Attributes:
        rank: global rank.
        host: name of its host.
        pid: process id there.
        phase: name of its phase.
        seconds: duration of the phase so far.
        limit_s: limit of the phase.
        batches: number of times it has begun to wait for data.
        steps: number of steps it has begun.
        silent_s: seconds since any of its threads ran Python.
        state: state of the process: R runs, S sleeps, D waits for a disk, T is stopped.
    """

    rank: int
    host: str
    pid: int
    phase: str
    seconds: float
    limit_s: float
    batches: int
    steps: int
    silent_s: float
    state: str

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid}) in {self.phase!r} for {self.seconds:.0f} s"

    def place(self) -> tuple[int, bool, int, bool, int]:
        """How far the rank has come; earlier places in a step are smaller. Hooks come before `LAST`."""
        last = LAST.index(self.phase) + 1 if self.phase in LAST else 0
        return self.batches, self.phase != "data", self.steps, self.phase != "step", last


def verdict_of(folder: Path, ranks: int, wait_s: float) -> Finding:
    """Wait for the reports of all ranks, and find the one that hangs; the first rank that can writes it."""
    end = time.monotonic() + wait_s
    while len(reports := read_reports(folder)) < ranks and time.monotonic() < end:
        time.sleep(0.1)
    found = name_the_one(reports, ranks)
    try:
        handle = os.open(folder / VERDICT, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return found
    with os.fdopen(handle, "w") as file:
        file.write(f"{found.why}\n" + "".join(f"  {report}, state {report.state}\n" for report in reports))
    return found


def read_reports(folder: Path) -> list[Report]:
    """Read the reports that exist, by rank."""
    paths = folder.glob(REPORT.format("*"))
    return sorted((Report(**json.loads(path.read_text())) for path in paths), key=lambda one: one.rank)


def name_the_one(reports: list[Report], ranks: int) -> Finding:
    """Return the rank, host and phase that differ from the others.

    A rank is named if it does not report, is stopped or holds the GIL; otherwise the ranks at another place
    than most. Of two places with equally many ranks, the one behind is named, because others wait for it.
    """
    missing = sorted(set(range(ranks)) - {report.rank for report in reports})
    if missing:
        listed = ", ".join(map(str, missing))
        return Finding(f"hang: no report from rank {listed} (its host is gone or unreachable)")
    stopped = [one for one in reports if one.state in "Tt"]
    silent = [one for one in reports if one.silent_s > SILENT_S]
    for found, why in ((stopped, "the process is stopped"), (silent, "no thread of it runs Python")):
        if found and len(found) < max(len(reports), 2):
            return _blaming(found, f": {why}")
    places = Counter(one.place() for one in reports)
    if len(places) == 1:
        first = reports[0]
        phases = " and ".join(sorted({repr(one.phase) for one in reports}))
        where = f"{phases} after {first.steps} steps"
        who = "the only rank" if ranks == 1 else f"all {ranks} ranks"
        return Finding(f"hang: {who} in {where} for {first.seconds:.0f} s: see hang/stacks-*.txt")
    fewest = min(places.values())
    rare = min(place for place, count in places.items() if count == fewest)
    odd = [one for one in reports if one.place() == rare]
    others = next(one for one in reports if one.place() != rare)
    return _blaming(odd, f", while others wait in {others.phase!r}")


def _blaming(reports: list[Report], because: str) -> Finding:
    hosts = short_names([report.host for report in reports])
    return Finding(f"hang: {'; '.join(map(str, reports))}{because}", hosts)
