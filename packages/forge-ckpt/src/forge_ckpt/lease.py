"""Who may write to a run: a lease in its folder, which one process holds at a time.

    lease/epoch-000000007    the holder: host, process, since when; written once
    lease/beat-000000007     a number that grows while the holder lives
    lease/free-000000007     the holder gave it back

The highest epoch owns the run. An epoch is created by a hard link (by `O_EXCL` where there are none), of
which only one can succeed on local disks, NFS and Lustre alike; flock is not used. A dead holder is detected
by its process id and start time on the same machine, and by a number that no longer grows on any other.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import re
import secrets
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from forge_ckpt.error import LockedError

log = logging.getLogger(__name__)

BEAT_S = 3.0
"""How often the holder shows that it lives."""
STALE_S = 30.0
"""A holder on another machine that shows nothing for so long is taken for dead."""
LINKLESS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EACCES, errno.EMLINK}
"""What file systems without hard links answer."""

UNKNOWN = ""
_EPOCH = re.compile(r"(epoch|beat|free)-(\d{9,})")


@dataclass(frozen=True)
class Holder:
    """A process that took the lease.

    Attributes:
        host: name of its host.
        pid: process id on that host.
        since: when it took the lease, ISO 8601 in UTC.
        job: its SLURM job, if any.
        machine: names the machine until its next boot.
        namespace: names the container in which the process id is valid.
        started: when the process started, which tells it from a later process with the same id.
        nonce: random number of this attempt.
    """

    host: str
    pid: int
    since: str
    job: str | None
    machine: str
    namespace: str
    started: str
    nonce: str

    @classmethod
    def me(cls) -> Holder:
        """This process."""
        pid = os.getpid()
        since = datetime.now(UTC).isoformat(timespec="seconds")
        job = os.environ.get("SLURM_JOB_ID")
        process = _process(pid) or UNKNOWN
        nonce = secrets.token_hex(8)
        return cls(platform.node(), pid, since, job, this_machine(), _namespace(), process, nonce)

    def is_alive(self) -> bool | None:
        """Whether the process runs; None when that cannot be seen from this machine or container."""
        if (self.machine, self.namespace) != (this_machine(), _namespace()):
            return None
        return _process(self.pid) in (self.started, UNKNOWN)

    def __str__(self) -> str:
        job = f" (SLURM job {self.job})" if self.job else ""
        return f"process {self.pid} on {self.host}{job} since {self.since}"


class Lease:
    """A lease that this process holds; made by `take`.

    A daemon thread shows every `beat_s` seconds that the holder lives.
    """

    def __init__(self, folder: Path, epoch: int, beat_s: float, stale_s: float) -> None:
        self.folder = folder
        self.epoch = epoch
        self._stale_s = stale_s
        self._me = _read(folder, epoch)
        self._beats = 0
        self._seen_s = time.monotonic()
        self._lost = False
        self._released = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._live, args=(beat_s,), name="lease", daemon=True)
        self._thread.start()

    def is_held(self) -> bool:
        """Whether no other process took the run over; reads the disk if this process was stopped for long."""
        if time.monotonic() - self._seen_s > self._stale_s / 2:
            self._look()
        return not self._lost

    def release(self) -> None:
        """Give the lease back; the next one may take it at once."""
        if self._released.is_set():
            return
        self._released.set()
        self._thread.join()
        try:
            if not self._lost:
                (self.folder / f"free-{self.epoch:09d}").touch()
        except OSError as error:
            log.warning("the lease of %s could not be given back: %s", self.folder.parent, error)

    def _live(self, beat_s: float) -> None:
        while not self._released.wait(beat_s):
            self._look()
            self._beat()

    def _look(self) -> None:
        try:
            self._lost = self._lost or newest_epoch(self.folder) > self.epoch or self._is_replaced()
            self._seen_s = time.monotonic()
        except OSError as error:
            log.debug("the lease cannot be looked at: %s", error)

    def _is_replaced(self) -> bool:
        """Whether somebody removed the folder, and another process took the same epoch there."""
        holder = _read(self.folder, self.epoch)
        return None not in (holder, self._me) and holder != self._me

    def _beat(self) -> None:
        self._beats += 1
        try:
            (self.folder / f"beat-{self.epoch:09d}").write_text(str(self._beats))
        except OSError as error:
            log.debug("the lease cannot show that its holder lives: %s", error)


def take(folder: Path, beat_s: float = BEAT_S, stale_s: float = STALE_S) -> Lease:
    """Take the lease in a folder, or take it over from a holder that died.

    Returns at once unless the last holder was on another machine (or in another container) and did not give
    the lease back: then it is watched for up to `stale_s` seconds.

    Raises:
        LockedError: a living process holds it; nothing was changed.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        epoch = newest_epoch(folder)
        if epoch and _watch(folder, epoch, beat_s, stale_s):
            raise LockedError(locked(folder))
        if _create(folder, epoch + 1):
            if newest_epoch(folder) == epoch + 1:
                break
            _remove(folder, epoch + 1)  # somebody took a later one meanwhile
    _sweep(folder, epoch + 1)
    return Lease(folder, epoch + 1, beat_s, stale_s)


def locked(folder: Path) -> str:
    """Return the message for a process that may not write to the run."""
    holder = read_holder(folder) or "another process"
    return f"{folder.parent} is being written by {holder}; wait until that ends, or end it"


def read_holder(folder: Path) -> Holder | None:
    """Return the last holder of the lease, dead or alive; None if it is free, or its file cannot be read."""
    try:
        epoch = newest_epoch(folder)
        return None if not epoch or _is_free(folder, epoch) else _read(folder, epoch)
    except OSError:
        return None


def newest_epoch(folder: Path) -> int:
    """Return the number of the newest lease; 0 when there was none."""
    return max(_epochs(folder), default=0)


def _epochs(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = (_EPOCH.fullmatch(name) for name in names)
    return [int(match[2]) for match in found if match and match[1] == "epoch"]


def _watch(folder: Path, epoch: int, beat_s: float, stale_s: float) -> bool:
    """Whether the holder of an epoch lives; False also when the epoch is no longer the newest."""
    end_s, is_reported = time.monotonic() + stale_s, False
    first = _signs(folder, epoch)
    while True:
        if _is_free(folder, epoch) or newest_epoch(folder) > epoch:
            return False
        holder = _read(folder, epoch)
        alive = holder.is_alive() if holder else None
        if alive is not None:
            return alive
        if _signs(folder, epoch) != first:
            return True
        if time.monotonic() > end_s:
            return False
        if not is_reported:
            log.warning("looking for up to %.0f s whether %s still writes %s", stale_s, holder, folder.parent)
            is_reported = True
        time.sleep(min(beat_s, stale_s) / 4)


def _signs(folder: Path, epoch: int) -> tuple[bytes | None, ...]:
    """Return data that change while a holder lives. Opening the files makes NFS ask its server."""
    return tuple(_bytes(folder / f"{kind}-{epoch:09d}") for kind in ("epoch", "beat"))


def _create(folder: Path, epoch: int) -> bool:
    """Create an epoch whole, as the only one who can."""
    target, me = folder / f"epoch-{epoch:09d}", Holder.me()
    text = json.dumps(asdict(me), indent=2) + "\n"
    partial = folder / f".{me.nonce}"
    partial.write_text(text)
    try:
        os.link(partial, target)
        return True
    except OSError as error:
        if error.errno in LINKLESS:
            return _create_exclusively(target, text)
        if error.errno != errno.EEXIST:
            raise
        return _read(folder, epoch) == me  # NFS may repeat a request that had succeeded
    finally:
        partial.unlink(missing_ok=True)


def _create_exclusively(target: Path, text: str) -> bool:
    try:
        with target.open("x") as file:
            file.write(text)
        return True
    except FileExistsError:
        return False


def _sweep(folder: Path, epoch: int) -> None:
    """Remove older epochs. The newest is never removed, so numbers only grow."""
    for older in _epochs(folder):
        if older < epoch:
            _remove(folder, older)


def _remove(folder: Path, epoch: int) -> None:
    for kind in ("epoch", "beat", "free"):
        (folder / f"{kind}-{epoch:09d}").unlink(missing_ok=True)


def _is_free(folder: Path, epoch: int) -> bool:
    return (folder / f"free-{epoch:09d}").exists()


def _read(folder: Path, epoch: int) -> Holder | None:
    try:
        return Holder(**json.loads(_bytes(folder / f"epoch-{epoch:09d}") or b""))
    except (ValueError, TypeError):
        return None


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


@cache
def this_machine() -> str:
    """Return a name of the machine that holds until its next boot."""
    boot = _bytes(Path("/proc/sys/kernel/random/boot_id"))
    return boot.decode().strip() if boot else f"{platform.node()}-{uuid.getnode():x}"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _process(pid: int) -> str | None:
    """Return the start time of a process in ticks since boot; UNKNOWN if hidden; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return UNKNOWN if _exists(pid) else None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
