"""The folder of all checkpoints of a run on one disk, as its first rank sees it. Imports no torch.

    checkpoints/step-000001000/     see `manifest`
    checkpoints/pin-000001000       see `pins`
    checkpoints/PROGRESS            the highest step ever published

Names with a dot in front are no checkpoints: `.tmp-` is being written or was left by a crash, `.bad-` was
damaged, `.old-` was unreadable and was written again, `.swap-` is about to become `.old-` (and goes back if
its step is missing), `.trash-` is being deleted.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from forge_ckpt import manifest as manifests
from forge_ckpt.disk import sync, write_durably
from forge_ckpt.error import CheckpointError, DamagedError
from forge_ckpt.lease import newest_epoch
from forge_ckpt.manifest import Manifest
from forge_ckpt.pins import pins

log = logging.getLogger(__name__)

PROGRESS = "PROGRESS"
_STEP = re.compile(r"step-(\d{9,})")
_TMP = re.compile(r"\.tmp-(\d+)-.*")
_SWAP = re.compile(r"\.swap-(\d{9,})-.*")


class Folders:
    """Begins, publishes, lists, sets aside and removes checkpoints.

    Args:
        root: the folder.
        lease: the folder of the lease of the run, if there is one: a process without the lease cannot
            publish.
        marks: further files outside of the folder that record the highest step.
        epoch: the epoch of our lease; None takes the newest one now.
    """

    def __init__(
        self,
        root: Path,
        lease: Path | None = None,
        marks: Sequence[Path] = (),
        epoch: int | None = None,
    ) -> None:
        self.root = root
        self._lease = lease
        self._marks = [root / PROGRESS, *marks]
        self._own_epoch = _epoch_of(lease) if epoch is None else epoch
        self._reachable = False

    def of(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.root / manifests.step_name(step)

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, oldest first; not verified."""
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        found = (int(match[1]) for name in names if (match := _STEP.fullmatch(name)))
        return sorted(step for step in found if manifests.step_name(step) in names)

    def begin(self, step: int) -> Path:
        """Make a new temporary folder for a step, beside its final place.

        Raises:
            OSError: it cannot be made.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self.sweep()
        temporary = self.root / f".tmp-{self._own_epoch}-{step:09d}-{secrets.token_hex(4)}"
        temporary.mkdir()
        return temporary

    def publish(self, temporary: Path, manifest: Manifest, replaces: bool = False) -> None:
        """Rename a folder of flushed files to a checkpoint.

        Args:
            temporary: the folder.
            manifest: its manifest.
            replaces: whether it replaces a checkpoint of its step, which becomes `.old-...`.

        Raises:
            CheckpointError: another process writes to the run now.
            OSError: it could not be published; nothing is there.
        """
        data = manifests.encode(manifest)
        write_durably(temporary / manifests.NAME, data)
        sync(temporary)
        self.require_lease()
        target = self.of(manifest.step)
        if replaces and target.exists():
            os.rename(target, self.root / f".swap-{manifest.step:09d}-{secrets.token_hex(4)}")
        try:
            os.rename(temporary, target)
        except FileNotFoundError:
            # NFS may repeat a request that had succeeded.
            if manifests.read_file(target / manifests.NAME) != data:
                raise
        finally:
            if replaces:
                self.settle()
        self._after_commit(manifest.step)

    def require_lease(self) -> None:
        """Check that this start still owns the run.

        Raises:
            CheckpointError: another process writes to the run now, or its disk is gone.
        """
        if self._lease is None or (newest := newest_epoch(self._lease)) == self._own_epoch:
            return
        if not newest:
            raise CheckpointError(f"{self._lease} is empty or gone; is the disk there?")
        raise CheckpointError(
            f"another process took over {self.root.parent} (start {newest}, this is {self._own_epoch})"
        )

    def settle(self) -> None:
        """Finish an interrupted replacement: the replaced checkpoint goes back, or becomes `.old-`.

        Never raises: a later call settles the rest.
        """
        try:
            for name in os.listdir(self.root):
                if match := _SWAP.fullmatch(name):
                    target = self.of(int(match[1]))
                    if target.exists():
                        sync(self.root)  # or a power cut leaves neither under its name
                        target = self.root / name.replace(".swap-", ".old-", 1)
                    os.rename(self.root / name, target)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("what a save has left in %s is not settled: %s", self.root, error)

    def _after_commit(self, step: int) -> None:
        """A context in which an error is a warning, because the save has succeeded."""
        for work in (self._sync, lambda: self._mark(step)):
            try:
                work()
            except OSError as error:
                log.warning("step %d is saved, but: %s", step, error)

    def _sync(self) -> None:
        """Sync the name of a checkpoint to the disk; the first time, the names of its parent folders too."""
        sync(self.root)
        for folder in self.root.absolute().parents if not self._reachable else ():
            with suppress(OSError):  # somebody else made it, or it is of another kind
                sync(folder)
            if folder.is_mount():
                break
        self._reachable = True

    def _mark(self, step: int) -> None:
        highest = str(max(step, self.progress())).encode()
        for path in self._marks:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
            try:
                write_durably(temporary, highest)
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)

    def remember(self, step: int) -> None:
        """Record that a step was published, also if a crash prevented that before; never raises."""
        try:
            if self.progress() < step:
                self._mark(step)
        except OSError as error:
            log.warning("that there is step %d could not be noted: %s", step, error)

    def progress(self) -> int:
        """Return the highest step ever published, even if its checkpoint is gone; -1 if there was none.

        A malformed file counts as step 0: there was a checkpoint.

        Raises:
            OSError: it cannot be read.
        """
        return max(step for path in self._marks for step in [_marked(path)])

    def marks(self) -> list[Path]:
        """Return the files that record that there was a checkpoint."""
        return [path for path in self._marks if path.exists()]

    def put_aside(self, step: int, kind: str, reason: object) -> None:
        """Rename the checkpoint of a step to `.bad-` or `.old-`, so that it is no checkpoint any more."""
        log.warning("step %d is put aside: %s", step, reason)
        os.rename(self.of(step), self.root / f".{kind}-{step:09d}-{secrets.token_hex(4)}")

    def sweep(self) -> None:
        """Remove the leftovers of a crash, never files that a later start of the run is writing."""
        for name in os.listdir(self.root):
            match = _TMP.fullmatch(name)
            if match and int(match[1]) <= self._own_epoch:
                self._remove(self.root / name)
            elif name.startswith(".trash-"):
                shutil.rmtree(self.root / name, ignore_errors=True)
        for mark in self._marks:
            left = re.compile(rf"\.{re.escape(mark.name)}-[0-9a-f]{{8}}")
            with suppress(OSError):
                for name in filter(left.fullmatch, os.listdir(mark.parent)):
                    (mark.parent / name).unlink(missing_ok=True)

    def remove(self, step: int) -> None:
        """Remove a checkpoint."""
        self._remove(self.of(step))

    def _remove(self, path: Path) -> None:
        trash = self._to_trash(path)
        if trash is not None:
            shutil.rmtree(trash, ignore_errors=True)

    def _to_trash(self, path: Path) -> Path | None:
        """Rename a folder to a unique name, so that a folder published meanwhile is not emptied."""
        trash = self.root / f".trash-{path.name.lstrip('.')}-{secrets.token_hex(4)}"
        try:
            os.rename(path, trash)
        except FileNotFoundError:
            return None  # published, or removed by somebody else
        return trash

    def prune(
        self,
        keep: int,
        stays: Callable[[int], bool],
        verify: bool,
        known_good_step: int | None = None,
        doubtful: Collection[int] = (),
    ) -> list[int]:
        """Remove expired checkpoints; the newest intact one, milestones and pins always stay.

        Args:
            keep: number of newest checkpoints that stay, not counting milestones.
            stays: whether a step is a milestone; checkpoints that were saved as milestones are, too.
            verify: whether intact means that every byte was read and compared, or only manifests and sizes.
            known_good_step: the newest intact checkpoint of this step or an earlier one stays, too; None
                takes the step that the newest checkpoint names.
            doubtful: checkpoints that stay, and do not count.

        Returns:
            The steps removed.
        """
        steps = [step for step in self.steps() if step not in doubtful]
        passing = [step for step in steps if not stays(step) and not self._is_milestone(step)]
        if len(passing) <= keep:
            return []
        intact, needed = self._down_to_intact(steps[::-1], verify)
        if not intact:
            return []
        known_good_step = self._known_good_step(steps) if known_good_step is None else known_good_step
        if known_good_step is not None and needed[-1] > known_good_step:
            needed += self._down_to_intact([step for step in steps[::-1] if step <= known_good_step], verify)[
                1
            ]
        needed += pins(self.root)
        return [step for step in passing[:-keep] if step not in needed and self._remove_unpinned(step)]

    def _known_good_step(self, steps: Sequence[int]) -> int | None:
        """Return the step that the newest checkpoint names as known good."""
        for step in steps[::-1]:
            with suppress(CheckpointError):
                return manifests.read(self.of(step), sizes=False).sound
        return None

    def _remove_unpinned(self, step: int) -> bool:
        """Remove a checkpoint unless it was pinned at this moment; returns whether it is removed."""
        trash = self._to_trash(self.of(step))
        if trash is not None and step in pins(self.root):
            os.rename(trash, self.of(step))
            return False
        if trash is not None:
            shutil.rmtree(trash, ignore_errors=True)
        return True

    def verify(self, step: int) -> Manifest:
        """Read a whole checkpoint and compare every byte.

        Raises:
            DamagedError, UnreadableError, UnsupportedError: as for `manifest.read`.
        """
        from forge_ckpt.shards import verify_file

        opened = manifests.read(self.of(step))
        for rank in range(opened.world_size):
            verify_file(self.of(step), opened, rank)
        return opened

    def confirm(self, step: int, names: Sequence[str]) -> str | None:
        """Return the damage of some files of a checkpoint, as this rank sees it; None if there is none."""
        from forge_ckpt.shards import verify_file

        try:
            opened = manifests.read(self.of(step))
            ranks = {int(match[1]) for name in names if (match := re.fullmatch(r"rank-(\d+)\..*", name))}
            for rank in sorted(ranks):
                verify_file(self.of(step), opened, rank)
        except DamagedError as error:
            return str(error)
        except CheckpointError:
            pass
        return None

    def _down_to_intact(self, steps: Sequence[int], verify: bool) -> tuple[bool, list[int]]:
        """Return whether one is intact, that one, and newer ones that cannot be read and so may be intact."""
        maybe: list[int] = []
        for step in steps:
            try:
                if self._is_intact(step, verify):
                    return True, [*maybe, step]
            except CheckpointError as error:
                log.warning("step %d is not removed: %s", step, error)
                maybe.append(step)
        return False, maybe

    def _is_intact(self, step: int, verify: bool) -> bool:
        """Whether a checkpoint is not damaged. Raises CheckpointError if that cannot be determined now."""
        try:
            if verify:
                self.verify(step)
            else:
                opened = manifests.read(self.of(step))
                for rank in range(opened.world_size):
                    manifests.read_index(self.of(step), opened, rank)
        except DamagedError as error:
            log.warning("step %d does not count as a checkpoint to keep: %s", step, error)
            return False
        return True

    def _is_milestone(self, step: int) -> bool:
        try:
            return manifests.read(self.of(step), sizes=False).milestone
        except DamagedError:
            return False
        except CheckpointError:
            return True  # it may be one


def marks_around(root: Path) -> list[Path]:
    """Return the files, outside of this folder, in which a run records that it had checkpoints."""
    run = root.absolute().parent
    return [run / PROGRESS, run.parent / ".progress" / run.name]


def _epoch_of(lease: Path | None) -> int:
    """Return the epoch of this start: the newest one now, not at its first save."""
    try:
        return newest_epoch(lease) if lease is not None else 0
    except OSError as error:
        log.warning("nothing will be saved: %s cannot be looked at: %s", lease, error)
        return -1


def _marked(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # never waits for a pipe
    except FileNotFoundError:
        return -1
    try:
        data = os.read(descriptor, 64) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
        return max(0, int(data))
    except ValueError:
        return 0
    finally:
        os.close(descriptor)
