"""Checks the file system of a folder for runs: renames, durability, locks, space, speed, clock."""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from forge_trainer.doctor.finding import Finding, fine

ENOUGH = 10 * 2**30
SPEED_BYTES = 64 * 2**20
SLOW_MB_S, SLOW_FSYNC_S, SKEW_S = 50, 0.5, 2.0


def folder_findings(folder: Path) -> list[Finding]:
    """Run all checks of a folder; create it if it is missing, and remove the scratch files at the end."""
    scratch = folder / f".doctor-{os.getpid()}"
    try:
        scratch.mkdir(parents=True)
    except OSError as error:
        return [
            Finding(
                "run folder",
                "wrong",
                f"{folder}: {error.strerror}",
                "checkpoints and metrics are written there",
                "give another folder (job.root), or ask for the right to write",
            )
        ]
    try:
        checks = (_kind, _rename, _durable, _lock, _space, _clock)
        return [_guarded(check, scratch) for check in checks]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _guarded(check: Callable[[Path], Finding], scratch: Path) -> Finding:
    try:
        return check(scratch)
    except OSError as error:
        name = check.__name__.removeprefix("_")
        kind = errno.errorcode.get(error.errno or 0, "error")
        return Finding(
            name, "wrong", f"{kind}: {error.strerror}", "a save would fail the same way", "try another folder"
        )


def _kind(scratch: Path) -> Finding:
    kind = file_system(scratch)
    if kind == "tmpfs":
        why = "it lies in memory: what is written is lost with the machine, and counts as memory of the job"
        return Finding("file system", "warning", kind, why, "keep runs on a disk")
    return fine("file system", f"{kind} at {scratch.parent}")


def _rename(scratch: Path) -> Finding:
    """Check that a folder gets its final name atomically, and never replaces an existing folder."""
    for name in ("new", "old"):
        (scratch / name).mkdir()
        (scratch / name / "file").write_text(name)
    try:
        os.rename(scratch / "new", scratch / "old")
    except OSError:
        os.rename(scratch / "new", scratch / "final")
        if (scratch / "final" / "file").read_text() == "new":
            return fine("rename", "folders are renamed whole, and replace nothing")
    return Finding(
        "rename",
        "wrong",
        "a folder was renamed onto one that was not empty",
        "a checkpoint is published by one rename; here one could replace another",
        "keep runs on another file system",
    )


def _durable(scratch: Path) -> Finding:
    block, start = os.urandom(2**20), time.perf_counter()
    with open(scratch / "speed", "wb") as file:
        for _ in range(SPEED_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    speed = SPEED_BYTES / 1e6 / (time.perf_counter() - start)
    start = time.perf_counter()
    with open(scratch / "small", "wb") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    handle = os.open(scratch, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    seconds = time.perf_counter() - start
    found = f"{speed:,.0f} MB/s with fsync; a small file takes {seconds * 1e3:.1f} ms"
    if speed < SLOW_MB_S or seconds > SLOW_FSYNC_S:
        why = "each checkpoint waits for the disk, in the background as long as the one before is written"
        return Finding(
            "durable writes", "warning", found, why, "save less often, or on a parallel file system"
        )
    return fine("durable writes", found)


def _lock(scratch: Path) -> Finding:
    with open(scratch / "lock", "w") as first, open(scratch / "lock") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return fine("flock", "works")
    return Finding(
        "flock",
        "warning",
        "two holders at once",
        "a second start of a run is then told only by the lease file and its age",
        "nothing must be done; do not start a run twice within seconds",
    )


def _space(scratch: Path) -> Finding:
    free = shutil.disk_usage(scratch).free
    stats = os.statvfs(scratch)
    found = f"{free / 2**30:,.1f} GiB free, {stats.f_favail:,} files"
    short = free < ENOUGH or (stats.f_files and stats.f_favail < 10_000)
    if short:
        why = (
            "a checkpoint of a model of 1B parameters takes 12 GB, and the one before stays until it is whole"
        )
        return Finding("space", "warning", found, why, "make room; a quota may be smaller still")
    return fine("space", found)


def _clock(scratch: Path) -> Finding:
    before = time.time()
    (scratch / "clock").touch()
    skew = (scratch / "clock").stat().st_mtime - before
    if not -SKEW_S < skew < SKEW_S:
        why = "the age of a lease is told by the file system's clock, and logs of several hosts mix"
        return Finding("clock", "warning", f"the file system is {skew:+.1f} s off", why, "ask for NTP")
    return fine("clock", f"within {max(abs(skew), 0.1):.1f} s of the file system's")


def file_system(path: Path) -> str:
    """Return the type of the file system of a path from /proc/mounts; `unknown` without it."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    at = str(path.resolve())
    under = [m for m in mounts if at == m[1] or at.startswith(m[1].rstrip("/") + "/")]
    return max(under, key=lambda m: len(m[1]))[2] if under else "unknown"
