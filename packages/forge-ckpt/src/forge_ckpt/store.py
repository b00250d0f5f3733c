"""The checkpoints of a run: written beside, published by one rename, found again by verification.

    checkpoints/step-000001000/{manifest.json, rank-00000.bin, ...}
    checkpoints/PROGRESS            the highest step ever published

What starts with a dot is not a checkpoint: `.tmp-` is being written or was left by a crash, `.bad-` was found
damaged, `.trash-` is being deleted.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_ckpt import manifest as manifests
from forge_ckpt.error import CheckpointError, DamagedError
from forge_ckpt.manifest import Entry, Manifest, Snapshot

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from forge_ckpt.shards import LocalShard, Shard

log = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d{9,})")


class Store:
    """Saves and loads; the collective methods must be called by all ranks of `group`.

    Args:
        root: folder of the checkpoints.
        keep: newest checkpoints that stay.
        keep_every_steps: checkpoints at multiples of this stay for good; 0 keeps none.
        group: a CPU group for nothing else, so that it never waits for training; None in a lone process.
        local_shard: which part of a tensor this rank holds, `functools.partial(forge_parallel.local_shard,
            mesh=mesh)` for sharded models; without it, every tensor is plain and the same on all ranks.
    """

    def __init__(
        self,
        root: Path,
        keep: int = 3,
        keep_every_steps: int = 0,
        group: ProcessGroup | None = None,
        local_shard: LocalShard | None = None,
    ) -> None:
        self.root = Path(root)
        self.keep = keep
        self.keep_every_steps = keep_every_steps
        self._group = group
        self._rank, self._world_size = 0, 1
        if group is not None:
            import torch.distributed as dist

            self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._local_shard = local_shard

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.root / f"step-{step:09d}"

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, oldest first; not verified."""
        if not self.root.is_dir():
            return []
        return sorted(int(m[1]) for entry in self.root.iterdir() if (m := _STEP.fullmatch(entry.name)))

    def save(self, step: int, snapshot: Snapshot) -> None:
        """Write a checkpoint and remove those no longer kept. Collective.

        Does nothing if the step is there and intact already. A checkpoint that is there is never written
        into.

        Args:
            step: optimizer steps taken.
            snapshot: what this rank holds. Ranks may hold different tensors and values (stages of a
                pipeline); what has one name on several ranks must be the same there.

        Raises:
            CheckpointError: on every rank when any of them could not write; earlier checkpoints are
            untouched.
        """
        partial = self._from_first(lambda: self._begin(step))
        if partial is None:
            return
        shard = self._shard(self._first_holders(snapshot.tensors))
        try:
            mine: Any = (*self._write(partial, snapshot.tensors, shard), dict(snapshot.values))
        except Exception as error:  # the other ranks must hear of it, not wait for this one
            mine = f"{type(error).__name__}: {error}"
        everyone = self._gather(mine)
        failures = [
            f"rank {rank}: {answer}" for rank, answer in enumerate(everyone) if isinstance(answer, str)
        ]
        if failures:
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(f"step {step} could not be saved: {'; '.join(failures)}")
        self._from_first(lambda: self._publish(step, partial, everyone, dict(snapshot.meta)))

    def _shard(self, mine: Collection[str] = ()) -> Callable[[str, Tensor], Shard]:
        """Which box this rank holds of a tensor; `mine` are the plain ones that it writes."""
        from forge_ckpt.shards import plain_shard

        given = self._local_shard
        return lambda key, tensor: given(tensor) if given else plain_shard(tensor, key in mine)

    def _first_holders(self, keys: Collection[str]) -> set[str]:
        """Those of the keys that no rank before this one has; without meaning if `local_shard` decides."""
        if self._local_shard is not None:
            return set()
        return set(keys).difference(*self._gather(sorted(keys))[: self._rank])

    def _begin(self, step: int) -> Path | None:
        """A new folder to write into, or None when the step is there already."""
        self.root.mkdir(parents=True, exist_ok=True)
        for stale in [*self.root.glob(".tmp-*"), *self.root.glob(".trash-*")]:
            shutil.rmtree(stale, ignore_errors=True) if stale.is_dir() else stale.unlink()
        if self.folder(step).exists():
            try:
                manifests.read(self.folder(step))
                return None
            except DamagedError as error:
                self._quarantine(step, error)
        partial = self.root / f".tmp-{step:09d}-{secrets.token_hex(4)}"
        partial.mkdir()
        return partial

    def _write(
        self, partial: Path, tensors: Mapping[str, Tensor], shard: Callable[[str, Tensor], Shard]
    ) -> tuple[str, int, dict[str, Entry]]:
        """Write this rank's file; returns its name, its size and what it holds."""
        from forge_ckpt.shards import write_boxes

        name = f"rank-{self._rank:05d}.bin"
        with (partial / name).open("wb") as file:
            entries = write_boxes(file, name, tensors, shard)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        return name, size, entries

    def _publish(self, step: int, partial: Path, everyone: list[Any], meta: dict[str, Any]) -> None:
        import torch

        tensors: dict[str, Entry] = {}
        values: dict[str, Any] = {}
        for rank, (_, _, entries, own) in enumerate(everyone):
            for key, entry in entries.items():
                known = tensors.setdefault(key, Entry(dtype=entry.dtype, shape=entry.shape, chunks=[]))
                if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                    raise CheckpointError(
                        f"{key} is {entry.dtype} {entry.shape} on rank {rank}, and {known.dtype} "
                        f"{known.shape} on one before; one name is one tensor on all ranks"
                    )
                known.chunks.extend(entry.chunks)
            for key, value in own.items():
                if values.setdefault(key, value) != value:
                    raise CheckpointError(
                        f"{key} is {value!r} on rank {rank}, and {values[key]!r} on one before; one name is "
                        "one value on all ranks"
                    )
        made = Manifest(
            format=manifests.FORMAT,
            step=step,
            world_size=self._world_size,
            torch=str(torch.__version__),
            meta=meta,
            values=values,
            files={name: size for name, size, _, _ in everyone},
            tensors=tensors,
        )
        _write_durably(partial / manifests.NAME, manifests.encode(made))
        _sync_folder(partial)
        os.rename(partial, self.folder(step))
        _sync_folder(self.root)
        progress = self.root / f".tmp-progress-{secrets.token_hex(4)}"
        _write_durably(progress, str(max(step, self.progress())).encode())
        os.replace(progress, self.root / "PROGRESS")
        self.prune()

    def progress(self) -> int:
        """The highest step ever published, even if its checkpoint is gone; -1 when there was none."""
        try:
            return int((self.root / "PROGRESS").read_text())
        except (FileNotFoundError, ValueError):
            return -1

    def resume(self, targets: Callable[[Mapping[str, Entry]], Mapping[str, Tensor]]) -> Manifest | None:
        """Load the newest intact checkpoint, in place. Collective.

        Every rank verifies the bytes it needs before any live tensor changes. What is damaged on any rank
        is put aside as `.bad-...` by all, and the next older one is tried.

        Args:
            targets: given what a checkpoint holds, the tensors to load it into.

        Returns:
            Its manifest, or None if this run never had a checkpoint.

        Raises:
            CheckpointError: on every rank; the targets of some rank do not fit, or those of all ranks
            together are not all that it holds; or there were checkpoints, and none of them is intact.
        """
        from forge_ckpt.shards import commit

        for step in self._from_first(lambda: self.steps()[::-1]):
            found = self._stage(step, targets)
            everyone: list[_Staged] = self._gather(found.told())
            damaged = [one.damaged for one in everyone if one.damaged]
            if not damaged:
                _require_fit(step, everyone, sorted(found.opened.tensors) if found.opened else [])
                assert found.opened is not None
                commit(found.tensors, found.targets, self._shard())
                return found.opened
            if self._rank == 0:
                self._quarantine(step, damaged[0])
        if (highest := self._from_first(self.progress)) >= 0:
            raise CheckpointError(
                f"{self.root} once held step {highest}, and no intact checkpoint is left; look at it before "
                "starting anew (a run that starts again at step 0 needs another name)"
            )
        return None

    def _stage(self, step: int, targets: Callable[[Mapping[str, Entry]], Mapping[str, Tensor]]) -> _Staged:
        """Read what this rank needs of a checkpoint, verified."""
        from forge_ckpt.shards import misfits, stage

        try:
            opened = manifests.read(self.folder(step))
            wanted = targets(opened.tensors)
            wrong = misfits(opened, wanted)
            unwanted = [key not in wanted for key in sorted(opened.tensors)]
            tensors = {} if wrong else stage(self.folder(step), opened, wanted, self._shard())
            return _Staged(opened, tensors, wanted, wrong=wrong, unwanted=bytes(unwanted))
        except DamagedError as error:
            return _Staged(damaged=str(error))
        except CheckpointError as error:
            return _Staged(wrong=[str(error)])
        except Exception as error:  # the other ranks must hear of it, not wait for this one
            return _Staged(wrong=[f"{type(error).__name__}: {error}"])

    def newest(self) -> Manifest:
        """The manifest of the newest checkpoint whose manifest and sizes are good; to look, not to resume.

        Raises:
            CheckpointError: there is none.
        """
        for step in reversed(self.steps()):
            try:
                return manifests.read(self.folder(step))
            except DamagedError as error:
                log.warning("step %d is passed over: %s", step, error)
        raise CheckpointError(f"there is no intact checkpoint in {self.root}")

    def load(self, opened: Manifest, targets: Mapping[str, Tensor]) -> None:
        """Load some tensors of a checkpoint, in place, verified.

        Raises:
            CheckpointError: one is missing or has another shape or dtype.
            DamagedError: the bytes are not those that were written.
        """
        from forge_ckpt.shards import commit, misfits, stage

        _require_fit(opened.step, [_Staged(wrong=misfits(opened, targets))], [])
        staged = stage(self.folder(opened.step), opened, targets, self._shard())
        commit(staged, targets, self._shard())

    def verify(self, step: int) -> None:
        """Read a whole checkpoint and compare every byte.

        Raises:
            DamagedError: names file and place.
        """
        opened = manifests.read(self.folder(step))
        for entry in opened.tensors.values():
            for chunk in entry.chunks:
                manifests.read_chunk(self.folder(step), chunk)

    def prune(self) -> list[int]:
        """Remove what is no longer kept; the newest checkpoint that is intact always stays.

        Returns:
            The steps removed.
        """
        steps = self.steps()
        intact = next((s for s in reversed(steps) if self._looks_intact(s)), None)
        if intact is None:
            return []
        every = self.keep_every_steps
        going = [s for s in steps[: -self.keep] if s != intact and not (every and s % every == 0)]
        for step in going:
            trash = self.root / f".trash-{step:09d}-{secrets.token_hex(4)}"
            os.rename(self.folder(step), trash)
            shutil.rmtree(trash, ignore_errors=True)
        return going

    def _looks_intact(self, step: int) -> bool:
        try:
            manifests.read(self.folder(step))
        except DamagedError:
            return False
        return True

    def _quarantine(self, step: int, reason: object) -> None:
        log.warning("step %d is put aside: %s", step, reason)
        os.rename(self.folder(step), self.root / f".bad-{step:09d}-{secrets.token_hex(4)}")

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self._world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _from_first(self, work: Callable[[], Any]) -> Any:
        """What the first rank finds, on every rank; file systems may show others something else."""
        if self._group is None:
            return work()
        import torch.distributed as dist

        answer: list[Any] = [None, None]
        if self._rank == 0:
            try:
                answer[0] = work()
            except Exception as error:  # every rank must hear of it, not wait for this one
                answer[1] = f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(answer, src=dist.get_global_rank(self._group, 0), group=self._group)
        if answer[1] is not None:
            raise CheckpointError(answer[1])
        return answer[0]


@dataclass(frozen=True)
class _Staged:
    """What a rank has read of a checkpoint, or why it could not.

    Attributes:
        opened: the manifest.
        tensors: the boxes that this rank holds, by name.
        targets: where they go.
        damaged: what is damaged.
        wrong: what does not fit the targets.
        unwanted: one byte a tensor of the checkpoint in order of names, 1 where this rank does not want it.
    """

    opened: Manifest | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    targets: Mapping[str, Tensor] = field(default_factory=dict)
    damaged: str = ""
    wrong: Sequence[str] = ()
    unwanted: bytes = b""

    def told(self) -> _Staged:
        """What the other ranks need to hear."""
        return _Staged(damaged=self.damaged, wrong=self.wrong, unwanted=self.unwanted)


def _require_fit(step: int, everyone: Sequence[_Staged], names: Sequence[str]) -> None:
    """Raises CheckpointError if something does not fit some rank, or is wanted by none."""
    wrong = {line for one in everyone for line in one.wrong}
    unwanted = [one.unwanted for one in everyone if len(one.unwanted) == len(names)]
    nobody = (all(column) for column in zip(*unwanted, strict=True))
    wrong |= {f"{name} is not wanted" for name, no in zip(names, nobody, strict=False) if no}
    if wrong:
        shown = "\n".join(f"  {line}" for line in sorted(wrong)[:20])
        raise CheckpointError(f"step {step} does not fit this model and optimizer ({len(wrong)}):\n{shown}")


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
