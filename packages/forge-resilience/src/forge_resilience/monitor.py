"""The process beside a rank that notices when it hangs. Run as a script; its imports take no time.

It works when the rank cannot: its main thread waits in C++ or holds the GIL, or the process is stopped.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forge_resilience.hang import MARK, REPORT, Report, verdict_of
from forge_resilience.heartbeat import Heartbeat, HeartbeatFile
from forge_resilience.last_words import last_words

POLL_S = 0.5
STACKS_S, OTHERS_S, END_S = 0.5, 5.0, 3.0
"""How long a rank may take to write its stacks, other ranks to report, and a rank to end by itself."""


def main(settings: dict[str, Any]) -> None:
    """Watch until the rank is gone or hangs.

    Args:
        settings: `path` of the heartbeat, `stacks` where the rank writes them, its `pid`, `rank`, `ranks`,
            `host`, `folder` of the reports, and `least_s` after which a stopped rank hangs in any phase.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    file, folder = HeartbeatFile(settings["path"]), Path(settings["folder"])
    awake_s = time.monotonic()
    pardon_s = 0.0
    while not _is_gone(POLL_S):
        now = time.monotonic()
        if now - awake_s > 4 * POLL_S:
            pardon_s = now  # this process was stopped too, as all of a job is that is suspended
        awake_s = now
        beat = file.read()
        if beat is None or not beat.limit_s:
            continue
        # before the first step, what lies there may be of an earlier start
        called = beat.steps > 0 and (folder / MARK).exists()
        late = now - max(beat.since_s, pardon_s) > beat.limit_s
        silent_s = now - max(beat.alive_s, pardon_s)
        if called or late or (silent_s > settings["least_s"] and _state(settings["pid"]) == "T"):
            _report(settings, folder, beat)
            break
    file.remove()  # a rank that was killed could not


def _is_gone(seconds: float) -> bool:
    """Wait at most so many seconds for the rank to close its end of the pipe, as it does when it dies."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


def _report(settings: dict[str, Any], folder: Path, beat: Heartbeat) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    pid, rank, now = settings["pid"], settings["rank"], time.monotonic()
    report = Report(
        rank=rank,
        host=settings["host"],
        pid=pid,
        phase=beat.phase,
        seconds=round(now - beat.since_s, 1),
        limit_s=round(beat.limit_s, 1),
        batches=beat.batches,
        steps=beat.steps,
        silent_s=round(now - beat.alive_s, 1),
        state=_state(pid),
    )
    _signal(pid, signal.SIGQUIT)  # writes the stacks, see `Watchdog`
    time.sleep(STACKS_S)
    shutil.copy(settings["stacks"], folder / f"stacks-{rank}.txt")
    path = folder / REPORT.format(rank)
    path.with_suffix(".tmp").write_text(json.dumps(report.as_dict()))
    path.with_suffix(".tmp").rename(path)
    found = verdict_of(folder, settings["ranks"], OTHERS_S)
    last_words(f"rank {rank}: {found.why}\n" if rank else f"{found.why}\n")
    sys.stdout.write(json.dumps(asdict(found)) + "\n")
    sys.stdout.flush()  # a thread of the rank reads it and ends the process with the right code
    if not _is_gone(END_S):
        _signal(pid, signal.SIGKILL)
        _signal(pid, signal.SIGCONT)


def _state(pid: int) -> str:
    """Return the state letter of the system: R runs, S sleeps, D waits for a disk, T is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "?"


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
