"""Reading a checkpoint on several ranks: which replica reads which tensor, and whether it fits all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from forge_ckpt.error import CheckpointError, DamagedError, UnreadableError
from forge_ckpt.manifest import Manifest, digest
from forge_ckpt.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor

    from forge_ckpt.shards import Box


MOST_TOLD = 20
"""So many tensors that do not fit are named; there may be as many as there are tensors, on each rank."""


@dataclass(frozen=True)
class Attempt:
    """The result of reading a checkpoint on one rank, or why it failed.

    Attributes:
        opened: the manifest.
        tensors: the tensors of this rank, by name.
        boxes: the boxes to copy them into.
        damaged: what is damaged.
        file: the name of the damaged file.
        unreadable: what cannot be read now.
        wrong: what does not fit the targets, or this version.
        failed: why this rank could not go on, such as lack of memory; says nothing about the checkpoint.
        unwanted: one byte a tensor of the checkpoint in order of names, 1 if this rank does not want it.
    """

    opened: Manifest | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    boxes: Mapping[str, Box] = field(default_factory=dict)
    damaged: str = ""
    file: str = ""
    unreadable: str = ""
    wrong: Sequence[str] = ()
    failed: str = ""
    unwanted: bytes = b""

    def for_others(self) -> Attempt:
        """The part of the attempt that other ranks need."""
        return Attempt(
            damaged=self.damaged,
            file=self.file,
            unreadable=self.unreadable,
            wrong=self.wrong if len(self.wrong) <= MOST_TOLD else [*self.wrong[:MOST_TOLD], "..."],
            failed=self.failed,
            unwanted=self.unwanted,
        )


def attempt(work: Callable[[], Attempt]) -> Attempt:
    """Return the result of a rank, or its failure as a value, so that the other ranks do not wait for it."""
    try:
        return work()
    except DamagedError as error:
        return Attempt(damaged=str(error), file=error.path.name)
    except UnreadableError as error:
        return Attempt(unreadable=str(error))
    except CheckpointError as error:
        return Attempt(wrong=[str(error)])
    except Exception as error:  # the other ranks must hear of it, not wait for this one
        return Attempt(failed=": ".join(filter(None, [type(error).__name__, str(error)])))


class Replicas:
    """The ranks that want the same boxes of a checkpoint: each of them reads some. Collective.

    Args:
        ranks: all ranks that load.
        wanted: the boxes that this rank wants.
    """

    def __init__(self, ranks: Ranks, wanted: Attempt) -> None:
        self._ranks, self._boxes = ranks, wanted.boxes
        names = sorted(self._boxes)
        places = [(name, self._boxes[name].offsets, tuple(self._boxes[name].values.shape)) for name in names]
        files = wanted.opened.files if wanted.opened is not None else []  # folders may differ between hosts
        everyone = ranks.gather(digest(msgspec.json.encode((files, places))))
        self._alike = [rank for rank, theirs in enumerate(everyone) if theirs == everyone[ranks.rank]]
        self._reader = self._shared_out(names)

    def _shared_out(self, names: Sequence[str]) -> dict[str, int]:
        """Return the reader of each tensor. Each reads neighbours, which share blocks that are read whole."""
        total, before, reader = sum(box.values.nbytes for box in self._boxes.values()), 0, {}
        for name in names:
            num_bytes = self._boxes[name].values.nbytes
            share = (2 * before + num_bytes) * len(self._alike) // (2 * total or 1)
            reader[name] = self._alike[min(share, len(self._alike) - 1)]
            before += num_bytes
        return reader

    def read(self, folder: Path, wanted: Attempt) -> Attempt:
        """Read and verify this rank's share; its other tensors are allocated without values.

        Raises:
            DamagedError, UnreadableError, UnsupportedError: as for `shards.read_verified`.
        """
        import torch

        from forge_ckpt.shards import read_verified

        if wanted.opened is None or wanted.wrong:
            return wanted
        mine = {name: box for name, box in self._boxes.items() if self._reader[name] == self._ranks.rank}
        tensors = read_verified(folder, wanted.opened, mine)
        for name in self._boxes.keys() - mine.keys():
            values = self._boxes[name].values
            tensors[name] = torch.empty(values.shape, dtype=values.dtype)
        return replace(wanted, tensors=tensors)

    def exchange(self, tensors: Mapping[str, Tensor]) -> None:
        """Exchange the tensors that each replica has read. Collective, of all replicas.

        Each sends to one of the others and receives from another at a time, so that all links are in use.
        """
        read_by: dict[int, list[Tensor]] = {rank: [] for rank in self._alike}
        for name in sorted(tensors):
            read_by[self._reader[name]].append(tensors[name])
        size, mine = len(self._alike), self._alike.index(self._ranks.rank)
        for distance in range(1, size):
            to, source = self._alike[(mine + distance) % size], self._alike[(mine - distance) % size]
            self._ranks.swap(read_by[self._ranks.rank], to, read_by[source], source)


def require_fit(step: int, everyone: Sequence[Attempt], names: Sequence[str]) -> None:
    """Raises CheckpointError if some rank could not read, something does not fit it, or is wanted by none."""
    for rank, one in enumerate(everyone):
        if one.failed:
            raise CheckpointError(f"step {step} could not be loaded on rank {rank}: {one.failed}")
    wrong = {line for one in everyone for line in one.wrong}
    unwanted = [one.unwanted for one in everyone if len(one.unwanted) == len(names)]
    nobody = (all(column) for column in zip(*unwanted, strict=True))
    wrong |= {f"{name} is not wanted" for name, no in zip(names, nobody, strict=False) if no}
    if wrong:
        shown = "\n".join(f"  {line}" for line in [*sorted(wrong - {"..."}), *wrong & {"..."}][:MOST_TOLD])
        count = f"{len(wrong)}" if "..." not in wrong else f"more than {MOST_TOLD}"
        raise CheckpointError(f"step {step} does not fit this model and optimizer ({count}):\n{shown}")


def misfits(manifest: Manifest, boxes: Mapping[str, Box]) -> list[str]:
    """Return the tensors that a checkpoint does not hold in their shape and dtype, one line each."""
    wrong = [f"{key} is not in the checkpoint" for key in boxes.keys() - manifest.tensors.keys()]
    for key in boxes.keys() & manifest.tensors.keys():
        have, want = (
            f"{entry.dtype} {list(entry.shape)}" for entry in (manifest.tensors[key], boxes[key].entry)
        )
        if have != want:
            wrong.append(f"{key} is {have}, wanted {want}")
    return wrong


def unwritable(boxes: Mapping[str, Box]) -> list[str]:
    """Return the boxes into which no values can be copied, one line each."""
    wrong = []
    for key, box in boxes.items():
        values = box.values
        if values.device.type == "meta":
            wrong.append(f"{key} is to be loaded into a tensor on the meta device")
        elif any(n > 1 and not stride for n, stride in zip(values.shape, values.stride(), strict=True)):
            wrong.append(f"{key} is to be loaded into a tensor whose elements share memory")
    return wrong
