"""The checkpoints of a run: written beside, published by one rename, found again by verification."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_ckpt import manifest as manifests
from forge_ckpt.disk import write_durably
from forge_ckpt.error import CheckpointError, DamagedError
from forge_ckpt.folders import Folders
from forge_ckpt.inspect.checkpointed import Checkpointed
from forge_ckpt.layout import Entry, Part, merge, part_of
from forge_ckpt.manifest import File, Manifest, Snapshot
from forge_ckpt.ranks import Ranks
from forge_ckpt.reading import Attempt, Replicas, attempt, misfits, require_fit, unwritable

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from forge_ckpt.shards import Box, LocalShard

log = logging.getLogger(__name__)

Targets = Callable[[Mapping[str, Entry]], Mapping[str, "Tensor"]]
"""Given what a checkpoint holds, the tensors to load it into."""


class Store:
    """Saves and loads; the collective methods must be called by all ranks of `group`.

    Args:
        root: folder of the checkpoints.
        keep: number of newest checkpoints that stay, beside those kept for good.
        keep_every_steps: checkpoints at multiples of this are kept for good; 0 keeps none.
        group: a CPU group for nothing else, so that it never waits for training; None in a lone process.
        local_shard: returns the shard of a tensor that this rank holds,
            `functools.partial(forge_parallel.local_shard, mesh=mesh)` for sharded models; without it, every
            tensor is plain and equal on all ranks that have it, which share the writing.
        lease: the folder of the lease of the run; a process without the lease cannot publish.
        marks: files outside of `root` that record that there were checkpoints.
        epoch: the epoch of our lease, `Lease.epoch`; None takes the newest one when this is made.
        stays: whether the checkpoint of a step is kept for good.
    """

    def __init__(
        self,
        root: Path,
        keep: int = 3,
        keep_every_steps: int = 0,
        group: ProcessGroup | None = None,
        local_shard: LocalShard | None = None,
        lease: Path | None = None,
        marks: Sequence[Path] = (),
        epoch: int | None = None,
        stays: Callable[[int], bool] = lambda step: False,
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"given keep {keep}; expected 1 or more")
        self.root = Path(root)
        self.keep = keep
        self._stays = lambda step: stays(step) or bool(keep_every_steps and step % keep_every_steps == 0)
        self._folders = Folders(self.root, lease, marks, epoch)
        self._ranks = Ranks(group)
        self._local_shard = local_shard
        self.known_good_step: int | None = None
        """Pruning keeps the newest checkpoint that is not of a later step than this: a run may go back to it.
        Saved with each checkpoint, so that others who prune know it too."""
        self._passed_over: set[int] = set()
        self._saving = threading.Lock()

    @property
    def first(self) -> bool:
        """Whether this is the first rank, or the only one."""
        return self._ranks.rank == 0

    def folder(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self._folders.of(step)

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, oldest first; not verified."""
        return self._folders.steps()

    def progress(self) -> int:
        """The highest step ever published, even if its checkpoint is gone; -1 if there was none."""
        return self._folders.progress()

    def save(self, step: int, snapshot: Snapshot | CheckpointError) -> None:
        """Write a checkpoint and remove expired ones. Collective.

        Does nothing if the step is there already, by its manifest and the sizes of its files. An existing
        checkpoint is never written into.

        Args:
            step: optimizer steps taken.
            snapshot: the state of this rank, or why it has none to save, which fails the save. Ranks may hold
                different tensors and values (stages of a pipeline); equal names on several ranks must have
                equal values.

        Raises:
            CheckpointError: on every rank when any of them could not write; earlier checkpoints are
                untouched.
        """
        with self._saving:
            self._save(step, snapshot)

    def _save(self, step: int, snapshot: Snapshot | CheckpointError) -> None:
        ranks, temporary = self._ranks, None
        try:
            begun, temporary = ranks.from_first(lambda: (step, self._begin(step)))
            ranks.each(lambda: _require_same(step, begun))
            if temporary is None:
                return
            self._write_all(step, temporary, snapshot)
        except CheckpointError as error:
            if ranks.rank == 0 and temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(f"step {step} could not be saved: {error}") from None
        self._passed_over.discard(step)
        self.tidy()  # the newest was written just now

    def _begin(self, step: int) -> Path | None:
        """A new folder to write into, or None when the step is there already."""
        if step < 0:
            raise CheckpointError(f"given step {step}; expected 0 or more")
        self._folders.require_lease()
        self._folders.settle()
        if self.folder(step).exists():
            try:
                if step not in self._passed_over:
                    manifests.read(self.folder(step))
                    return None
                log.warning("step %d was passed over, and is written again", step)
            except DamagedError as error:
                self._folders.put_aside(step, "bad", error)
        return self._folders.begin(step)

    def _write_all(self, step: int, temporary: Path, snapshot: Snapshot | CheckpointError) -> None:
        ranks = self._ranks
        boxes = ranks.each(lambda: self._boxes(_captured(snapshot).tensors))
        snapshot = _captured(snapshot)
        tables, table_of = ranks.distinct_tables({key: box.entry for key, box in boxes.items()})
        values = ranks.values_to_first(snapshot.values)
        boxes = ranks.share(boxes, tables, table_of)
        written = ranks.each(lambda: self._write(temporary, boxes))
        everyone = ranks.to_first(written)

        def publish() -> None:
            import torch

            manifests.require_json(snapshot.meta)
            entries, layouts = merge(tables, table_of, [part for _, part in everyone])
            made = Manifest(
                format=manifests.FORMAT,
                step=step,
                torch=str(torch.__version__),
                milestone=self._stays(step),
                meta=dict(snapshot.meta),
                values=manifests.merge_values(values),
                files=[file for file, _ in everyone],
                layouts=layouts,
                tensors=entries,
                sound=self.known_good_step,
            )
            self._folders.publish(temporary, made, replaces=step in self._passed_over)

        ranks.from_first(publish)

    def _boxes(self, tensors: Mapping[str, Tensor | Box]) -> dict[str, Box]:
        from forge_ckpt.shards import box_of

        return {key: box_of(key, tensor, self._local_shard) for key, tensor in tensors.items()}

    def staging_bytes(self, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> int:
        """Return the host memory that `copied_to_host` takes beyond these buffers."""
        from forge_ckpt.shards import staging_bytes

        return staging_bytes(self._boxes(tensors), buffers)

    def ranks_on_this_machine(self) -> int:
        """Return the number of ranks that share its memory. Collective."""
        return self._ranks.on_this_machine()

    def settle(self) -> None:
        """Finish a replacement that a crash interrupted; by the first rank only."""
        self._folders.settle()

    def copied_to_host(self, snapshot: Snapshot, buffers: dict[str, Tensor]) -> Snapshot:
        """Return a copy of this rank's state in host memory, so that training may go on; waits for a GPU.

        Args:
            snapshot: the state to copy.
            buffers: memory of the copy before, which must have been saved by now; updated.

        Raises:
            MemoryError, RuntimeError: there is no room for it.
        """
        from forge_ckpt.shards import copy_boxes

        try:
            boxes: Mapping[str, Any] = copy_boxes(self._boxes(snapshot.tensors), buffers)
        except (MemoryError, RuntimeError):
            buffers.clear()  # part of a copy is of no use, and the memory is short
            raise
        return replace(snapshot, tensors=boxes)

    def _write(self, temporary: Path, boxes: Mapping[str, Box]) -> tuple[File, Part]:
        """Write this rank's values and their index; returns the file and the part."""
        from forge_ckpt.shards import write_boxes

        rank = self._ranks.rank
        with (temporary / manifests.values_file_name(rank)).open("wb") as file:
            index, num_bytes, written = write_boxes(file, boxes)
            file.flush()
            os.fsync(file.fileno())
        data = manifests.encode(index)
        write_durably(temporary / manifests.index_file_name(rank), data)
        digest = manifests.digest(data).hex()
        return File(num_bytes, len(data), digest), part_of(sorted(boxes), written)

    def resume(self, targets: Targets, until: int | None = None) -> Manifest | None:
        """Load the newest intact checkpoint, in place. Collective.

        Before any live tensor changes, all bytes that any rank needs are verified, by that rank or by a
        replica of it, which sends them. A checkpoint that any rank finds damaged or unreadable is skipped by
        all, and the next older one is tried; it is renamed to `.bad-...` if the first rank finds the damage
        too.

        Args:
            targets: returns, for the contents of a checkpoint, the tensors to load it into.
            until: checkpoints of later steps are skipped. They stay, and the next plain `resume` finds them,
                unless their step is saved again: remove them if they are given up.

        Returns:
            Its manifest, or None if this run never had a checkpoint.

        Raises:
            CheckpointError: on every rank; the targets of some rank do not fit, or those of all ranks
                together are not the whole checkpoint; it was written by another version; or there were
                checkpoints, and none of them is intact.
        """
        from forge_ckpt.shards import commit

        steps = self._ranks.from_first(self._found)
        self._passed_over |= {step for step in steps if until is not None and step > until}
        for step in (step for step in steps if until is None or step <= until):
            found, replicas = self._read_verified(step, targets)
            everyone = self._ranks.gather(found.for_others())
            if not any(one.damaged or one.unreadable for one in everyone):
                require_fit(step, everyone, sorted(found.opened.tensors) if found.opened else [])
                assert found.opened is not None
                replicas.exchange(found.tensors)
                commit(found.tensors, found.boxes)
                return found.opened
            self._ranks.from_first(lambda step=step, everyone=everyone: self._pass_over(step, everyone))
            self._passed_over.add(step)
        if (highest := max([self._ranks.from_first(self.progress), *steps])) >= 0:
            marks = ", ".join(map(str, self._folders.marks())) or "what it holds"
            raise CheckpointError(
                f"{self.root} once held step {highest}, and no intact checkpoint is left; is the disk there? "
                "Look before starting anew. A run that starts again at step 0 needs another name, or "
                f"{marks} removed"
            )
        return None

    def _found(self) -> list[int]:
        """Return the steps to try, newest first."""
        self._folders.settle()
        steps = self.steps()[::-1]
        if steps:
            self._folders.remember(steps[0])
        return steps

    def _read_verified(self, step: int, targets: Targets) -> tuple[Attempt, Replicas]:
        """Read this rank's tensors of a checkpoint, verified, or its share of them. Collective."""
        wanted = attempt(lambda: self._wanted(step, targets))
        replicas = Replicas(self._ranks, wanted)
        return attempt(lambda: replicas.read(self.folder(step), wanted)), replicas

    def _wanted(self, step: int, targets: Targets) -> Attempt:
        """Return the tensors of a checkpoint that this rank needs."""
        # the first rank looks at the files of all ranks, the others see those that they read
        opened = manifests.read(self.folder(step), sizes=self._ranks.rank == 0)
        boxes = self._boxes(targets(opened.tensors))
        wrong = [*misfits(opened, boxes), *unwritable(boxes)]
        unwanted = bytes(key not in boxes for key in sorted(opened.tensors))
        return Attempt(opened, {}, {} if wrong else boxes, wrong=wrong, unwanted=unwanted)

    def _pass_over(self, step: int, everyone: Sequence[Attempt]) -> None:
        names = [one.file for one in everyone if one.file]
        proof = self._folders.confirm(step, names) if names else None
        if proof is not None:
            try:
                return self._folders.put_aside(step, "bad", proof)
            except OSError as error:
                log.warning("step %d is damaged, and could not be put aside: %s", step, error)
        else:
            reason = next(one.damaged or one.unreadable for one in everyone if one.damaged or one.unreadable)
            log.warning("step %d is passed over and left where it is: %s", step, reason)

    def newest(self) -> Manifest:
        """Return the newest manifest with an intact digest and file sizes; for inspection, not to resume.

        Raises:
            CheckpointError: there is none.
        """
        for step in reversed(self.steps()):
            try:
                return manifests.read(self.folder(step))
            except CheckpointError as error:
                log.warning("step %d is passed over: %s", step, error)
        raise CheckpointError(f"there is no intact checkpoint in {self.root}")

    def load(self, step: int, targets: Mapping[str, Tensor]) -> Manifest:
        """Load some tensors of a checkpoint, in place, verified.

        Raises:
            CheckpointError: one is missing or has another shape or dtype.
            DamagedError, UnreadableError, UnsupportedError: as for `manifest.read`.
        """
        from forge_ckpt.shards import commit, read_verified

        opened, boxes = self.require_fit(step, targets), self._boxes(targets)
        require_fit(step, [Attempt(wrong=unwritable(boxes))], [])
        commit(read_verified(self.folder(step), opened, boxes), boxes)
        return opened

    def require_fit(self, step: int, targets: Mapping[str, Tensor]) -> Manifest:
        """Check that a checkpoint holds some tensors; raises as `load` does."""
        opened = manifests.read(self.folder(step))
        require_fit(step, [Attempt(wrong=misfits(opened, self._boxes(targets)))], [])
        return opened

    def tensors(self, step: int) -> Checkpointed:
        """Return the tensors of a checkpoint by name, whole; each is read and verified on access.

        Raises:
            DamagedError, UnreadableError, UnsupportedError: as for `manifest.read`; also on access.
        """
        return Checkpointed(self.folder(step))

    def verify(self, step: int) -> Manifest:
        """Read a whole checkpoint and compare every byte.

        Raises:
            DamagedError, UnreadableError, UnsupportedError: as for `manifest.read`.
        """
        return self._folders.verify(step)

    def tidy(self) -> None:
        """Let the first rank prune, if the newest checkpoint is known to be intact; only logs errors."""
        if not self.first:
            return
        try:
            self.prune(verify=False)
        except (OSError, MemoryError) as error:
            log.warning("older checkpoints could not be removed: %s", error)

    def prune(self, verify: bool = True) -> list[int]:
        """Remove expired checkpoints; the newest intact one, milestones and pins always stay.

        Milestones do not count among the `keep` newest ones. Checkpoints that this process skipped when it
        loaded stay as well, and do not count.

        Args:
            verify: whether intact means that every byte was read, not only manifests, indices and sizes.

        Returns:
            The steps removed.
        """
        return self._folders.prune(self.keep, self._stays, verify, self.known_good_step, self._passed_over)

    def remove(self, step: int) -> None:
        """Remove a checkpoint; by the first rank only."""
        self._folders.remove(step)


def _require_same(step: int, first: int) -> None:
    if step != first:
        raise CheckpointError(f"this is step {step} here, and {first} on the first rank")


def _captured(snapshot: Snapshot | CheckpointError) -> Snapshot:
    if isinstance(snapshot, CheckpointError):
        raise snapshot
    return snapshot
